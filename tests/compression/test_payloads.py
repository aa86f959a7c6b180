"""Parts of payloads that are looked at before they are believed, and accumulators that kernels cannot write to."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore.compression.codec import Context, Payload, payload_integer
from kvstore.compression.dense_numpy import E4M3, FP16
from kvstore.compression.payloads import add_into, check_codes, check_finite, check_scales, payload_format
from kvstore.errors import PayloadError

CTX = Context("w", 3, rank=2)


def add_one(target: Any) -> None:
    assert target.dtype == np.float32
    assert target.flags.carray
    target += 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_any_accumulator_is_added_to(dtype: Any) -> None:
    out: Any = np.full(6, 2, dtype)
    add_into(out[::2], add_one)
    assert out.astype(float).tolist() == [3, 2, 3, 2, 3, 2]
    odd: Any = np.zeros(3 * out.itemsize + 1, np.uint8)[1:].view(dtype)
    add_into(odd, add_one)
    assert odd.astype(float).tolist() == [1, 1, 1]


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), 3e38])
def test_scales_that_could_decode_to_infinity_are_refused(scale: float) -> None:
    check_scales(np.array([0, 1, 7e35], np.float32), 448, CTX)
    with pytest.raises(PayloadError, match="key 'w', chunk 0, rank 2: a scale"):
        check_scales(np.array([0, scale], np.float32), 448, CTX)


def test_codes_of_infinity_and_nan_are_refused() -> None:
    check_codes(np.array([0xFE, 0x7E], np.uint8), E4M3, CTX)
    check_codes(np.array([0xFBFF], np.uint16), FP16, CTX)
    for codes, kind in ((np.array([0xFF], np.uint8), E4M3), (np.array([0x7C00], np.uint16), FP16)):
        with pytest.raises(PayloadError, match="infinity or NaN"):
            check_codes(codes, kind, CTX)
    with pytest.raises(PayloadError, match="infinity or NaN"):
        check_finite(np.array([1, np.inf], np.float32), CTX)


def test_a_format_is_one_of_those_known() -> None:
    known = {"e4m3": E4M3}
    assert payload_format(Payload(b"", {"format": "e4m3"}), "format", known, CTX) is E4M3
    for meta in ({}, {"format": 1}, {"format": "e3m4"}):
        with pytest.raises(PayloadError, match="one of e4m3 is needed"):
            payload_format(Payload(b"", meta), "format", known, CTX)


def test_an_integer_is_in_range_and_a_multiple() -> None:
    assert payload_integer(Payload(b"", {"bucket": 128}), "bucket", 64, 256, CTX, 64) == 128
    for given in (63, 65, 320, 64.0, "64", True, None):
        with pytest.raises(PayloadError, match="a multiple of 64 from 64 to 256"):
            payload_integer(Payload(b"", {"bucket": given}), "bucket", 64, 256, CTX, 64)  # type: ignore[dict-item]
