"""How sparse codecs write the values they send: float32, or cast to half precision."""

from __future__ import annotations

import numpy as np

from kvstore.compression.cast import decode_values_add, encode_values_into
from kvstore.compression.codec import Array, Context, Payload
from kvstore.compression.dense_numpy import BF16, FP16, Format
from kvstore.compression.kernels import kernels_for
from kvstore.compression.payloads import as_floats, check_codes, check_finite
from kvstore.errors import PayloadError

FORMATS: dict[str, Format | None] = {"float32": None, "float16": FP16, "bfloat16": BF16}


def value_bytes(dtype: str) -> int:
    """Bytes of one value."""
    kind = FORMATS[dtype]
    return 4 if kind is None else kind.nbytes


def value_type(payload: Payload, ctx: Context) -> str:
    """The dtype of the values, from the payload's meta.

    Raises:
        PayloadError: it is missing or unknown.
    """
    value = payload.meta.get("value")
    if not isinstance(value, str) or value not in FORMATS:
        text = f"{ctx}: the payload's value is {value!r}, one of {', '.join(FORMATS)} is needed"
        raise PayloadError(text, key=ctx.key, rank=ctx.rank)
    return value


def encode_values(values: Array, dtype: str) -> Array:
    """float32 values as bytes."""
    kind = FORMATS[dtype]
    if kind is None:
        return values.view(np.uint8)
    out = kernels_for(values).empty_bytes(values.size * kind.nbytes, values)
    encode_values_into(values, kind, out)
    return out


def decode_values(data: Array, dtype: str, ctx: Context | None = None) -> Array:
    """The values as float32; with `ctx` it is checked that all are finite.

    Raises:
        PayloadError: one is not.
    """
    kind = FORMATS[dtype]
    if kind is None:
        values = as_floats(data)
        if ctx is not None:
            check_finite(values, ctx)
        return values
    codes = data.view(kind.dtype)
    if ctx is not None:
        check_codes(codes, kind, ctx)
    values = np.zeros_like(codes, np.float32)
    decode_values_add(codes, kind, values)
    return values
