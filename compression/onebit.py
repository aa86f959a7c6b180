"""One bit per element with error feedback: `1bit`.

`two_means`: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014, section 3.2: the bit is p >= 0, and it
stands for the mean of the elements of its bucket on that side. `ef_sign`: Karimireddy et al. (arXiv:1901.09847),
algorithm 1: sign(p) times the mean magnitude of the bucket. Here p is gradient + residual.

Zero: it counts as >= 0 (also -0.0) and takes the scale of that side; error feedback takes it back at the next push.
A bucket of zeros has scale 0 and decodes to exact zeros: what is always zero stays zero, with no noise.

Bytes: the scales, float32 little endian, two for each bucket (one for ef_sign), then ceil(n / 8) bytes of bits, the
first element in the top bit. Meta: bucket (elements), means (2 or 1).
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
from kvstore.compression.dense_numpy import LANES, blocks_of
from kvstore.compression.kernels import family_for, kernels_for
from kvstore.compression.payloads import add_into, as_floats, check_scales

LARGEST_BUCKET = 65536


class OneBitParams(Params, frozen=True, tag=CompressionType.ONE_BIT.value):
    """scaling: what a bit stands for. bucket_size: elements that share the scales."""

    scaling: Literal["two_means", "ef_sign"] = "two_means"
    bucket_size: Annotated[int, msgspec.Meta(ge=64, le=65536, multiple_of=64)] = 1024


class OneBit:
    """One bit per element: which side of zero, scaled by the mean of that side.

    Error feedback is part of one pass, through `encode_feedback`.
    """

    params_type: ClassVar[type[Params]] = OneBitParams
    unit: ClassVar[Literal["chunk", "key"]] = "chunk"
    unbiased: ClassVar[bool] = False
    contraction: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    feedback: ClassVar[bool] = True

    def __init__(self, params: OneBitParams | None = None) -> None:
        own = params or OneBitParams()
        self.params: Params = own
        self.bucket, self.means = own.bucket_size, 2 if own.scaling == "two_means" else 1

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """A bit each and the scales; always exactly this."""
        return 4 * self.means * blocks_of(n, self.bucket) + blocks_of(n, 8)

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """Encode without memory: as with a residual of zero that is thrown away."""
        return self.encode_feedback(x, np.zeros_like(x), state, ctx)

    def encode_feedback(
        self, x: Array, residual: Array, state: State | None, ctx: Context
    ) -> tuple[Payload, State | None]:
        """residual += x, then send the side of each element and take what it stands for off, in one pass."""
        out = kernels_for(x).empty_bytes(self.max_bytes(ctx.n, ctx.dtype), x)
        split = out.size - blocks_of(ctx.n, 8)
        family = family_for("dense", x)
        family.encode_signs(x, residual, self.bucket, self.means, as_floats(out[:split]), out[split:])
        return Payload(out, {"bucket": self.bucket, "means": self.means}), state

    def check(self, payload: Payload, ctx: Context) -> None:
        """Bucket, byte count and scales; any bits decode. See `Codec.check`."""
        _checked(payload, ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out += the values; see `Codec.decode_add`."""
        kernels, dense = kernels_for(out), family_for("dense", out)
        scales, bits, bucket, means = _checked(payload, ctx)
        scales, bits = kernels.to_device(scales, out), kernels.to_device(bits, out)
        add_into(out, lambda target: dense.decode_signs_add(bits, scales, bucket, means, target))

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """Scales differ: payloads are added decoded."""
        return None


def _checked(payload: Payload, ctx: Context) -> tuple[Array, Array, int, int]:
    bucket = payload_integer(payload, "bucket", 64, LARGEST_BUCKET, ctx, multiple=LANES)
    means = payload_integer(payload, "means", 1, 2, ctx)
    split = 4 * means * blocks_of(ctx.n, bucket)
    data = payload_bytes(payload, split + blocks_of(ctx.n, 8), ctx)
    scales = as_floats(data[:split])
    check_scales(scales, 1, ctx)
    return scales, data[split:], bucket, means
