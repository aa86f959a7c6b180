"""TernGrad: every value rounded at random to -s, 0 or s: `terngrad`.

Wen et al. (arXiv:1705.07878), section 3: P(+-s) = |x| / s. Each bucket has its own scale s, the largest magnitude
after clipping (section 3.3). The clip is 2.5 times the root mean square, the standard deviation of gradients whose
mean is zero; it makes the scale smaller and the result biased towards zero. A bucket of zeros decodes to exact zeros.

Its variance is up to (1 + sqrt(bucket_size)) / 2 times the input: error feedback would diverge and is refused, unless
`scaled` divides the values by that number.

Bytes: the scales, float32 little endian, then two bits for each element as `2bit` lays them out. Meta: bucket.
"""

from __future__ import annotations

import math
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
from kvstore.compression.kernels_numpy import packed_size
from kvstore.compression.payloads import add_into, as_floats, check_scales
from kvstore.compression.philox import dither_key

LARGEST_BUCKET = 65536


class TernGradParams(Params, frozen=True, tag=CompressionType.TERNGRAD.value):
    """clip: of magnitudes, in units of the root mean square of the bucket; 0 does not clip, and is unbiased.

    bucket_size: elements that share a scale. scaled: divide by 1 + the largest variance, for error feedback.
    """

    clip: Annotated[float, msgspec.Meta(ge=0)] = 2.5
    bucket_size: Annotated[int, msgspec.Meta(ge=64, le=65536, multiple_of=64)] = 512
    scaled: bool = False


class TernGrad:
    """TernGrad: -s, 0 or s at random, two bits each."""

    params_type: ClassVar[type[Params]] = TernGradParams
    unit: ClassVar[Literal["chunk", "key"]] = "chunk"
    unbiased: bool
    contraction: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    feedback: bool

    def __init__(self, params: TernGradParams | None = None) -> None:
        own = params or TernGradParams()
        self.params: Params = own
        self.clip, self.bucket = own.clip, own.bucket_size
        self.unbiased, self.feedback = own.clip == 0 and not own.scaled, own.scaled
        self.divisor = (1 + math.sqrt(own.bucket_size)) / 2 if own.scaled else 1.0

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """Two bits each and four bytes for each bucket; always exactly this."""
        return 4 * blocks_of(n, self.bucket) + packed_size(n)

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """See `Codec.encode`."""
        out = kernels_for(x).empty_bytes(self.max_bytes(ctx.n, ctx.dtype), x)
        split, family = out.size - packed_size(ctx.n), family_for("dithered", x)
        scales = as_floats(out[:split])
        family.ternary_scales(x, self.bucket, self.clip, scales)
        family.encode_ternary(x, scales, self.bucket, dither_key(ctx), ctx.chunk, out[split:])
        if self.divisor != 1:
            scales /= np.float32(self.divisor)
        return Payload(out, {"bucket": self.bucket}), state

    def check(self, payload: Payload, ctx: Context) -> None:
        """Bucket, byte count and scales; any codes decode. See `Codec.check`."""
        _checked(payload, ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out += the values; see `Codec.decode_add`."""
        kernels, family = kernels_for(out), family_for("dithered", out)
        scales, codes, bucket = _checked(payload, ctx)
        scales, codes = kernels.to_device(scales, out), kernels.to_device(codes, out)
        add_into(out, lambda target: family.decode_ternary_add(codes, scales, bucket, target))

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """Scales differ: payloads are added decoded."""
        return None


def _checked(payload: Payload, ctx: Context) -> tuple[Array, Array, int]:
    bucket = payload_integer(payload, "bucket", 64, LARGEST_BUCKET, ctx, multiple=LANES)
    split = 4 * blocks_of(ctx.n, bucket)
    data = payload_bytes(payload, split + packed_size(ctx.n), ctx)
    scales = as_floats(data[:split])
    check_scales(scales, 1, ctx)
    return scales, data[split:], bucket
