"""Eight-bit floats with a scale per block: `fp8`, formats e4m3 (4 bits of precision) and e5m2 (3, wider range).

Micikevicius et al., "FP8 formats for deep learning" (arXiv:2209.05433), section 3. The scale of a block is its largest
magnitude / 448 (e5m2: 57344); codes are x / scale, to nearest, saturated. A block of zeros, or one whose scale would be
below the smallest normal float32, decodes to exact zeros.

Bytes: ceil(n / block) scales, float32 little endian, then n codes. Meta: format, block.
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
from kvstore.compression.dense_numpy import E4M3, E5M2, Format, blocks_of
from kvstore.compression.kernels import family_for, kernels_for
from kvstore.compression.payloads import add_into, as_floats, check_codes, check_scales, payload_format

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
SMALLEST_BLOCK, LARGEST_BLOCK = 64, 4096


class Fp8Params(Params, frozen=True, tag=CompressionType.FP8.value):
    """format: e4m3 is more precise, e5m2 spans more within one block. block: elements that share a scale."""

    format: Literal["e4m3", "e5m2"] = "e4m3"
    block: Annotated[int, msgspec.Meta(ge=64, le=4096, multiple_of=64)] = 256


class Fp8:
    """Eight-bit floats with one scale per block."""

    params_type: ClassVar[type[Params]] = Fp8Params
    unit: ClassVar[Literal["chunk", "key"]] = "chunk"
    unbiased: ClassVar[bool] = False
    contraction: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    feedback: ClassVar[bool] = False

    def __init__(self, params: Fp8Params | None = None) -> None:
        own = params or Fp8Params()
        self.params: Params = own
        self.format, self.block = own.format, own.block

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """A byte each and four for each block; always exactly this."""
        return n + 4 * blocks_of(n, self.block)

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """See `Codec.encode`."""
        kind, dense = FORMATS[self.format], family_for("dense", x)
        out = kernels_for(x).empty_bytes(self.max_bytes(ctx.n, ctx.dtype), x)
        split = out.size - ctx.n
        scales = as_floats(out[:split])
        dense.block_scales(x, self.block, kind.largest, scales)
        dense.encode_floats(x, scales, self.block, kind, out[split:])
        return Payload(out, {"format": self.format, "block": self.block}), state

    def check(self, payload: Payload, ctx: Context) -> None:
        """Format, block, byte count, scales, and that every code is finite; see `Codec.check`."""
        _checked(payload, ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out += the values; see `Codec.decode_add`."""
        kernels, dense = kernels_for(out), family_for("dense", out)
        scales, codes, block, kind = _checked(payload, ctx)
        scales, codes = kernels.to_device(scales, out), kernels.to_device(codes, out)
        add_into(out, lambda target: dense.decode_floats_add(codes, scales, block, kind, target))

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """Scales differ: payloads are added decoded."""
        return None


def _checked(payload: Payload, ctx: Context) -> tuple[Array, Array, int, Format]:
    kind = payload_format(payload, "format", FORMATS, ctx)
    block = payload_integer(payload, "block", SMALLEST_BLOCK, LARGEST_BLOCK, ctx)
    split = 4 * blocks_of(ctx.n, block)
    data = payload_bytes(payload, split + ctx.n, ctx)
    scales, codes = as_floats(data[:split]), data[split:]
    check_scales(scales, kind.largest, ctx)
    check_codes(codes, kind, ctx)
    return scales, codes, block, kind
