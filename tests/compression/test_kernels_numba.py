"""What is particular to the compiled kernels: any array is taken, nothing is compiled in mid-push."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.compression import kernels_numba as kernels
from kvstore.compression import kernels_numpy as reference
from kvstore.compression.kernels_numpy import packed_size
from kvstore.errors import ArrayError


def unaligned(x: Any, by: int = 1) -> Any:
    """A copy of x that starts at an odd address."""
    memory = np.zeros(x.nbytes + 8, np.uint8)
    view = memory[by : by + x.nbytes].view(x.dtype)
    view[:] = x
    return view


def read_only(x: Any) -> Any:
    """As bytes from a socket: an array over memory that must not be written."""
    return np.frombuffer(x.tobytes(), x.dtype)


def test_odd_inputs_give_the_same_and_compile_nothing(rng: np.random.Generator) -> None:
    kernels.warm_up()
    n = 1003
    gradient = rng.standard_normal(n).astype(np.float32)
    expected_residual, expected = np.zeros(n, np.float32), np.empty(packed_size(n), np.uint8)
    reference.quantise2(gradient, expected_residual, 0.5, expected)
    strided = np.repeat(gradient, 2)[::2]
    for odd in (read_only(gradient), unaligned(gradient), strided, gradient[::-1].copy()[::-1]):
        residual, out = np.zeros(n, np.float32), np.empty(packed_size(n), np.uint8)
        kernels.quantise2(odd, residual, 0.5, out)
        assert out.tobytes() == expected.tobytes()
        assert residual.tobytes() == expected_residual.tobytes()
        assert kernels.max_abs(odd) == reference.max_abs(gradient)
    for odd in (read_only(expected), unaligned(expected)):  # as payloads come
        sums = np.zeros((2, n), np.float32)
        kernels.decode2(odd, 0.5, sums[0])
        kernels.decode2_add_many([odd, odd], 0.5, sums[1])
        assert (sums[1] == 2 * sums[0]).all()
    compiled = (kernels._max_bits, kernels._quantise2, kernels._decode2, kernels._decode2_add_many)
    assert [len(function.signatures) for function in compiled] == [1, 1, 1, 1]


FLOATS: Any = np.zeros(32, np.float32)
BYTES: Any = np.zeros(8, np.uint8)
DOUBLES: Any = np.zeros(32)


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels.max_abs(DOUBLES),
        lambda: kernels.max_abs(np.zeros((2, 2), np.float32)),
        lambda: kernels.quantise2(FLOATS, FLOATS[:31].copy(), 0.5, BYTES.copy()),
        lambda: kernels.quantise2(FLOATS, FLOATS.copy(), 0.5, np.zeros(7, np.uint8)),
        lambda: kernels.quantise2(FLOATS, read_only(FLOATS), 0.5, BYTES.copy()),
        lambda: kernels.quantise2(FLOATS, np.zeros(64, np.float32)[::2], 0.5, BYTES.copy()),
        lambda: kernels.quantise2(FLOATS, unaligned(FLOATS), 0.5, BYTES.copy()),
        lambda: kernels.decode2(BYTES[:4], 0.5, FLOATS.copy()),
        lambda: kernels.decode2(BYTES, 0.5, DOUBLES),
        lambda: kernels.decode2_add_many([BYTES, BYTES[:4]], 0.5, FLOATS.copy()),
        lambda: kernels.decode2_add_many([], 0.5, FLOATS.copy()),
        lambda: kernels.decode2_add_many([BYTES] * 128, 0.5, FLOATS.copy()),
    ],
)
def test_an_array_that_does_not_fit_is_refused_before_its_address_is_taken(call: Callable[[], object]) -> None:
    with pytest.raises(ArrayError):
        call()


def test_serves_without_a_place_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(*, cache: bool, **options: object) -> Callable[[object], object]:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(kernels._numba, "njit", njit)
    assert kernels._jit(test_odd_inputs_give_the_same_and_compile_nothing) is not None
