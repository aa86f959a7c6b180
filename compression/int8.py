"""Eight-bit integers with a scale per block: `int8`.

The scale of a block is its largest magnitude / 127; codes are x / scale, rounded to nearest (ties to even) or at random
(unbiased; as QSGD with max norm, arXiv:1610.02132, section 3.1). A block of zeros, or one whose scale would be below
the smallest normal float32, decodes to exact zeros. Either rounding keeps the error below the input for blocks of up to
127^2 elements, so error feedback is safe; it is off by default.

Bytes: ceil(n / block) scales, float32 little endian, then n signed codes, -128 not among them. Meta: block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np

from kvstore.compression.codec import (
    Array,
    CompressionType,
    Context,
    Params,
    Payload,
    State,
    payload_bytes,
    payload_integer,
)
from kvstore.compression.dense_numpy import blocks_of
from kvstore.compression.kernels import family_for, kernels_for
from kvstore.compression.payloads import add_into, as_floats, check_scales
from kvstore.compression.philox import dither_key
from kvstore.errors import PayloadError

TOP = 127
SMALLEST_BLOCK, LARGEST_BLOCK = 64, 4096


class Int8Params(Params, frozen=True, tag=CompressionType.INT8.value):
    """block: elements that share a scale. rounding: nearest (least error) or stochastic (right on average)."""

    block: Annotated[int, msgspec.Meta(ge=64, le=4096, multiple_of=64)] = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"


class Int8:
    """Eight-bit integers with one scale per block."""

    params_type: ClassVar[type[Params]] = Int8Params
    unit: ClassVar[Literal["chunk", "key"]] = "chunk"
    unbiased: bool
    contraction: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    feedback: ClassVar[bool] = False

    def __init__(self, params: Int8Params | None = None) -> None:
        own = params or Int8Params()
        self.params: Params = own
        self.block, self.unbiased = own.block, own.rounding == "stochastic"

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """A byte each and four for each block; always exactly this."""
        return n + 4 * blocks_of(n, self.block)

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """See `Codec.encode`."""
        out = kernels_for(x).empty_bytes(self.max_bytes(ctx.n, ctx.dtype), x)
        split, dense = out.size - ctx.n, family_for("dense", x)
        scales, codes = as_floats(out[:split]), out[split:].view(np.int8)
        dense.block_scales(x, self.block, TOP, scales)
        if self.unbiased:
            family_for("dithered", x).round_ints(x, scales, self.block, dither_key(ctx), ctx.chunk, codes)
        else:
            dense.encode_ints(x, scales, self.block, codes)
        return Payload(out, {"block": self.block}), state

    def check(self, payload: Payload, ctx: Context) -> None:
        """Block, byte count, scales and codes; see `Codec.check`."""
        _checked(payload, ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out += the values; see `Codec.decode_add`."""
        kernels, dense = kernels_for(out), family_for("dense", out)
        scales, codes, block = _checked(payload, ctx)
        scales, codes = kernels.to_device(scales, out), kernels.to_device(codes, out)
        add_into(out, lambda target: dense.decode_ints_add(codes, scales, block, target))

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """Scales differ: payloads are added decoded."""
        return None


def _checked(payload: Payload, ctx: Context) -> tuple[Array, Array, int]:
    block = payload_integer(payload, "block", SMALLEST_BLOCK, LARGEST_BLOCK, ctx)
    split = 4 * blocks_of(ctx.n, block)
    data = payload_bytes(payload, split + ctx.n, ctx)
    scales, codes = as_floats(data[:split]), data[split:].view(np.int8)
    check_scales(scales, TOP, ctx)
    if codes.size and int(codes.min()) < -TOP:
        raise PayloadError(f"{ctx}: the payload holds the code -128", key=ctx.key, rank=ctx.rank)
    return scales, codes, block
