"""The reference itself, against the rule written out element by element."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.compression import kernels_numpy as kernels


@pytest.mark.parametrize(("n", "size"), [(0, 0), (1, 4), (16, 4), (17, 8), (32, 8), (33, 12)])
def test_sixteen_codes_take_a_word(n: int, size: int) -> None:
    assert kernels.packed_size(n) == size


def test_quantise2_follows_the_rule(rng: np.random.Generator) -> None:
    n, t = 20000, np.float32(0.3)  # more than a block
    gradient, residual = rng.standard_normal((2, n)).astype(np.float32)
    old, out = residual.copy(), np.empty(kernels.packed_size(n), np.uint8)
    kernels.quantise2(gradient, residual, 0.3, out)
    for i in (*range(100), *range(16300, 16500), n - 1):
        r = old[i] + gradient[i]
        code = 3 if r >= t else 2 if r <= -t else 0
        assert out[i // 4] >> (6 - 2 * (i % 4)) & 3 == code
        assert residual[i] == (r - t if code == 3 else r + t if code == 2 else r)


def test_sum_rounds_once() -> None:
    three = [np.array([0b11_00_00_00, 0, 0, 0], np.uint8)] * 3
    out = np.zeros(1, np.float32)
    kernels.decode2_add_many(three, 0.1, out)
    assert out[0] == np.float32(3) * np.float32(0.1)


def test_nan_wins_over_infinity_in_any_order() -> None:
    for order in ([np.nan, np.inf], [np.inf, np.nan]):
        assert np.isnan(kernels.max_abs(np.repeat(np.array(order, np.float32), 16384)))


def test_arrays_stay_where_they_are() -> None:
    x = np.zeros(3, np.float32)
    assert kernels.to_host(x) is x
    assert kernels.to_device(x, x) is x
    assert kernels.empty_bytes(8, x).nbytes == 8
