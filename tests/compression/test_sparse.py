"""Selection and bytes of sparse payloads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.compression import sparse
from kvstore.compression.codec import Context, Payload
from kvstore.errors import PayloadError


@pytest.mark.parametrize(
    ("x", "k", "expected"),
    [
        ([1, -3, 2], 1, [1]),
        ([1, -3, 2], 2, [1, 2]),
        ([2, -2, 2, 2], 2, [0, 1]),
        ([0, 0, 0], 1, [0]),
        ([1, 2], 5, [0, 1]),
    ],
)
def test_the_largest_are_selected_and_ties_go_to_the_lower_index(x: list[float], k: int, expected: list[int]) -> None:
    assert sparse.select_top(np.array(x, np.float32), k).tolist() == expected


def test_selection_is_exact(rng: np.random.Generator) -> None:
    for _ in range(50):
        x = rng.integers(-4, 5, 300).astype(np.float32)
        k = int(rng.integers(1, 300))
        expected = sorted(np.lexsort((np.arange(300), -np.abs(x)))[:k].tolist())
        assert sparse.select_top(x, k).tolist() == expected


@pytest.mark.parametrize(
    ("n", "ratio", "k"), [(0, 0.5, 0), (1, 0.001, 1), (1000, 0.001, 1), (1001, 0.001, 2), (10, 1, 10)]
)
def test_ratios_round_up(n: int, ratio: float, k: int) -> None:
    assert sparse.count(n, ratio) == k


def test_bytes_are_indices_then_values() -> None:
    payload, chosen = sparse.encode_top(np.array([0, 5, -1, 7], np.float32), 2)
    assert chosen.tolist() == [1, 3]
    assert payload.data.tobytes() == np.array([1, 3], "<u4").tobytes() + np.array([5, 7], "<f4").tobytes()
    out = np.ones(4)
    sparse.decode_add(payload, out, Context("w", 4))
    assert out.tolist() == [1, 6, 1, 8]


def payload(indices: list[int], values: list[float]) -> Any:
    return Payload(np.array(indices, "<u4").tobytes() + np.array(values, "<f4").tobytes())


@pytest.mark.parametrize(
    "broken",
    [payload([4], [1]), payload([1, 1], [1, 1]), payload([2, 1], [1, 1]), payload([0], [np.nan]),
     payload([0], [np.inf]), payload([0, 1, 2, 3, 4], [1] * 5), payload([], []), Payload(b"1234567")],
)  # fmt: skip
def test_broken_pairs_are_refused_and_change_nothing(broken: Payload) -> None:
    out = np.zeros(4, np.float32)
    with pytest.raises(PayloadError, match="key 'w'"):
        sparse.decode_add(broken, out, Context("w", 4))
    assert not out.any()
