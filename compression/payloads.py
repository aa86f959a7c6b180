"""What decoders of this folder share: parts of a payload, looked at before they are believed, and odd accumulators."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.compression.codec import Array, Context, Payload
from kvstore.compression.dense_numpy import LARGEST, Format
from kvstore.errors import PayloadError


def add_into(out: Array, add: Callable[[Array], None]) -> None:
    """Let `add` add to `out` itself where a kernel can write to it, else to a float32 array that is then added."""
    if out.dtype == np.float32 and out.flags.c_contiguous and getattr(out.flags, "aligned", True):
        add(out)
        return
    values = np.zeros_like(out, np.float32, order="C")
    add(values)
    with np.errstate(over="ignore"):
        out += values.astype(out.dtype)


def as_floats(part: Array) -> Array:
    """Little-endian float32 numbers out of bytes, without a copy where they are aligned."""
    return part.view(np.dtype("<f4"))


def check_scales(scales: Array, largest: float, ctx: Context) -> None:
    """Scales must be 0 or more, and times `largest` within float32, so that what is decoded is finite.

    Raises:
        PayloadError: one is not.
    """
    limit = LARGEST / np.float32(largest)
    if scales.size and not (float(scales.min()) >= 0 and float(scales.max()) <= limit):  # false for NaN
        text = f"{ctx}: a scale of the payload is not within 0..{limit:.3g}"
        raise PayloadError(text, key=ctx.key, rank=ctx.rank)


def check_codes(codes: Array, kind: Format, ctx: Context) -> None:
    """No code may stand for infinity or NaN.

    Raises:
        PayloadError: one does.
    """
    if codes.size and int((codes & codes.dtype.type(kind.magnitude)).max()) > kind.top:
        raise PayloadError(f"{ctx}: the payload holds infinity or NaN", key=ctx.key, rank=ctx.rank)


def check_finite(values: Array, ctx: Context) -> None:
    """float32 numbers must be finite.

    Raises:
        PayloadError: one is not.
    """
    if not bool(np.isfinite(values).all()):
        raise PayloadError(f"{ctx}: the payload holds infinity or NaN", key=ctx.key, rank=ctx.rank)


def payload_format(payload: Payload, name: str, known: dict[str, Format], ctx: Context) -> Format:
    """The format that the payload's meta names.

    Raises:
        PayloadError: it is missing or unknown.
    """
    value = payload.meta.get(name)
    if not isinstance(value, str) or value not in known:
        text = f"{ctx}: the payload's {name} is {value!r}, one of {', '.join(known)} is needed"
        raise PayloadError(text, key=ctx.key, rank=ctx.rank)
    return known[value]
