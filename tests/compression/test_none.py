"""Raw bytes: little endian, in the key's dtype, added in the accumulator's."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore.compression.codec import Codec, Context, Payload
from kvstore.compression.none import NoneCodec
from kvstore.errors import PayloadError

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.int64, np.uint8, np.bool_]
CODEC = NoneCodec()


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(dtype: type) -> None:
    x: Any = np.array([0, 1, 0, 1, 1], dtype)
    ctx = Context("w", 5, dtype=np.dtype(dtype))
    payload, state = CODEC.encode(x, None, ctx)
    assert state is None
    assert payload.nbytes == CODEC.max_bytes(5, ctx.dtype) == 5 * ctx.dtype.itemsize
    out: Any = np.empty(5, dtype)
    CODEC.decode_into(Payload(payload.data.tobytes()), out, ctx)
    assert out.tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_added_wide(dtype: type) -> None:
    x: Any = np.full(3, 1, dtype)
    ctx = Context("w", 3, dtype=np.dtype(dtype))
    out = np.full(3, 4096, np.float32)
    CODEC.decode_add(CODEC.encode(x, None, ctx)[0], out, ctx)
    assert out.tolist() == [4097] * 3


def test_no_copy_where_none_is_needed() -> None:
    x = np.arange(4, dtype=np.float32)
    payload, _ = CODEC.encode(x, None, Context("w", 4))
    assert np.shares_memory(payload.data, x)
    assert payload.data.tolist()[4:8] == [0, 0, 0x80, 0x3F]  # 1.0, little endian


def test_float32_sums_are_converted_to_the_keys_dtype() -> None:
    payload, _ = CODEC.encode(np.array([0.1], np.float32), None, Context("w", 1, dtype=np.dtype(np.float16)))
    assert payload.data.tobytes() == np.array([0.1], np.float16).tobytes()


@pytest.mark.parametrize("data", [b"", b"1234567", b"123456789"])
def test_another_number_of_bytes_is_refused(data: bytes) -> None:
    ctx, out = Context("w", 2), np.full(2, 7, np.float32)
    for call in (CODEC.decode_add, CODEC.decode_into):
        with pytest.raises(PayloadError, match="2 elements take 8"):
            call(Payload(data), out, ctx)
    with pytest.raises(PayloadError):
        CODEC.check(Payload(data), ctx)
    assert out.tolist() == [7, 7]


def test_is_a_codec() -> None:
    codec: Any = CODEC
    assert isinstance(codec, Codec)
    assert CODEC.sum_encoded([], Context("w", 0)) is None
