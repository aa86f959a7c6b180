"""Natural compression: every value rounded at random to a power of two, nine bits each: `natural`.

Horvath et al. (arXiv:1905.10988), definition 1 and theorem 1: unbiased, variance omega = 1/8. Magnitudes from 2^127 on
become 2^127, denormal ones become zero. The error never exceeds the value itself, so error feedback is safe; it is off
by default. `scaled` divides by 1 + omega, which makes the expected error least.

Bytes: n float32 exponent fields (0 for zero), then ceil(n / 8) bytes of sign bits, the first in the top bit.
Meta: scale, a factor of every value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from kvstore.compression.codec import (
    Array,
    CompressionType,
    Context,
    Params,
    Payload,
    State,
    payload_bytes,
    payload_number,
)
from kvstore.compression.dense_numpy import blocks_of
from kvstore.compression.kernels import family_for, kernels_for
from kvstore.compression.payloads import add_into
from kvstore.compression.philox import dither_key
from kvstore.errors import PayloadError

OMEGA = 1 / 8


class NaturalParams(Params, frozen=True, tag=CompressionType.NATURAL.value):
    """scaled: divide by 1 + 1/8; biased then, and with error feedback by default."""

    scaled: bool = False


class Natural:
    """Natural compression: sign and power of two, rounded at random."""

    params_type: ClassVar[type[Params]] = NaturalParams
    unit: ClassVar[Literal["chunk", "key"]] = "chunk"
    unbiased: bool
    contraction: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    feedback: bool

    def __init__(self, params: NaturalParams | None = None) -> None:
        own = params or NaturalParams()
        self.params: Params = own
        self.unbiased, self.feedback = not own.scaled, own.scaled
        self.scale = 1 / (1 + OMEGA) if own.scaled else 1.0

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """Nine bits each; always exactly this."""
        return n + blocks_of(n, 8)

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """See `Codec.encode`."""
        n = ctx.n
        out = kernels_for(x).empty_bytes(self.max_bytes(n, ctx.dtype), x)
        family_for("dithered", x).encode_natural(x, dither_key(ctx), ctx.chunk, out[:n], out[n:])
        return Payload(out, {"scale": self.scale}), state

    def check(self, payload: Payload, ctx: Context) -> None:
        """The byte count, the scale, and that no exponent is that of infinity; see `Codec.check`."""
        _checked(payload, ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out += the values; see `Codec.decode_add`."""
        family = family_for("dithered", out)
        data, scale = _checked(payload, ctx)
        data = kernels_for(out).to_device(data, out)
        add_into(out, lambda target: family.decode_natural_add(data[: ctx.n], data[ctx.n :], scale, target))

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """A sum of powers of two is none: payloads are added decoded."""
        return None


def _checked(payload: Payload, ctx: Context) -> tuple[Array, float]:
    data = payload_bytes(payload, ctx.n + blocks_of(ctx.n, 8), ctx)
    scale = payload_number(payload, "scale", ctx)
    if not 0 < scale <= 1:
        raise PayloadError(f"{ctx}: the payload's scale is {scale}, allowed is 0 to 1", key=ctx.key, rank=ctx.rank)
    if ctx.n and int(data[: ctx.n].max()) == 255:
        raise PayloadError(f"{ctx}: the payload holds infinity or NaN", key=ctx.key, rank=ctx.rank)
    return data, scale
