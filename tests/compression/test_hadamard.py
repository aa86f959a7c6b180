"""The rotation and the sums of its codecs: exact against matrices, alike in all twins."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.compression import hadamard, kernels

WIDTHS = (1, 2, 8, 64, 1024)


@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_the_hadamard_matrix(width: int, rng: np.random.Generator) -> None:
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rows = rng.integers(-8, 9, (3, width)).astype(np.float32)
    before = rows.copy()
    assert (hadamard.rotate_reference(rows) == rows @ matrix).all()
    assert (hadamard.rotate_reference(hadamard.rotate_reference(rows)) == width * rows).all()
    assert (rows == before).all()


@pytest.mark.parametrize("choice", ["numba", "numpy"])
def test_twins_agree_bit_for_bit(choice: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hadamard, "chosen_kernels", lambda: kernels.cpu_kernels(choice))
    for width in WIDTHS:
        rows = (rng.standard_normal((5, width)) * 10.0 ** rng.integers(-30, 30, (5, width))).astype(np.float32)
        rows.flags.writeable = False
        assert hadamard.rotate(rows).tobytes() == hadamard.rotate_reference(rows).tobytes()


def test_sums_go_by_halves() -> None:
    rows = np.array([[1e16, 1.0, -1e16, 1.0], [1, 2, 3, 4]])
    assert hadamard.tree_sum(rows).tolist() == [[(1e16 - 1e16) + (1.0 + 1.0)], [10]]
