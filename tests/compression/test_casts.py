"""Arrays in other dtypes, without warnings."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvstore.compression.casts import as_float32, on_host, saturated


def test_float32_stays_itself_and_what_is_too_large_becomes_infinity() -> None:
    x = np.ones(3, np.float32)
    assert as_float32(x) is x
    assert as_float32(np.array([1e300, -1e300, 1.5])).tolist() == [np.inf, -np.inf, 1.5]


@pytest.mark.parametrize(("dtype", "largest"), [(np.float16, 65504), (ml_dtypes.bfloat16, 3.3895314e38)])
def test_narrower_dtypes_take_the_largest_finite_value(dtype: type, largest: float) -> None:
    x = np.array([3.4e38, -3.4e38, np.inf, np.nan, 1], np.float32)
    found = saturated(x, np.dtype(dtype)).astype(np.float64)
    assert found[:3].tolist() == pytest.approx([largest, -largest, np.inf])
    assert np.isnan(found[3])
    assert found[4] == 1


def test_wider_dtypes_take_everything() -> None:
    assert saturated(np.array([3.4e38], np.float32), np.dtype(np.float64))[0] == np.float32(3.4e38)


def test_numbers_become_arrays() -> None:
    x = np.ones(2)
    assert on_host(x) is x
    assert on_host(3).tolist() == 3
