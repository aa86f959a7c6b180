"""The Walsh-Hadamard transform of rows, and sums over rows in a fixed order: alike, bit for bit, wherever they run."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from kvstore.compression.codec import Array
from kvstore.compression.kernels import chosen_kernels


def rotate(rows: Array) -> Array:
    """H times each row, not normalised: a new array. `rows`: (m, d) float32, d a power of two.

    Stage by stage, h = 1, 2, 4, ...: elements i and i + h of each run of 2 h become their sum and their difference.
    """
    if isinstance(rows, np.ndarray) and chosen_kernels().NAME == "numba":
        compiled: Any = importlib.import_module("kvstore.compression.hadamard_numba")
        out = np.array(rows, np.float32, order="C")
        compiled.rotate(out)
        return out
    return rotate_reference(rows)


def rotate_reference(rows: Array) -> Array:
    """As `rotate`, by array functions alone."""
    m, d = rows.shape
    h = 1
    while h < d:
        pairs = rows.reshape(m, d // (2 * h), 2, h)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        rows = np.stack([first + second, first - second], axis=2).reshape(m, d)
        h *= 2
    return rows.copy() if d == 1 else rows


def tree_sum(rows: Array) -> Array:
    """(m, 1) sums of rows whose length is a power of two, by halves: no order of execution changes a bit."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows
