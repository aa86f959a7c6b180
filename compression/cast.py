"""Half precision on the wire: `fp16` (IEEE binary16) and `bf16` (the upper half of float32).

Rounds to nearest, ties to even, denormals kept; what is beyond the largest finite value becomes that value, so a
gradient never turns into infinity. Servers add in float32. Bytes: n codes of two bytes, little endian. A payload that
holds infinity or NaN is refused. Chunks of keys that are half precision themselves travel raw: no bytes would be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from kvstore.compression.codec import Array, CompressionType, Context, Params, Payload, State, payload_bytes
from kvstore.compression.dense_numpy import BF16, FP16, Format
from kvstore.compression.kernels import family_for, kernels_for
from kvstore.compression.payloads import add_into, check_codes


class Fp16Params(Params, frozen=True, tag=CompressionType.FP16.value):
    """fp16 has no parameters of its own. Scale gradients that leave 6e-8 .. 65504 (loss scaling)."""


class Bf16Params(Params, frozen=True, tag=CompressionType.BF16.value):
    """bf16 has no parameters of its own."""


class Fp16:
    """Values rounded to IEEE half precision: 11 bits of precision, largest 65504."""

    params_type: ClassVar[type[Params]] = Fp16Params
    unit: ClassVar[Literal["chunk", "key"]] = "chunk"
    unbiased: ClassVar[bool] = False
    contraction: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    feedback: ClassVar[bool] = False
    kind: ClassVar[Format] = FP16

    def __init__(self, params: Params | None = None) -> None:
        self.params: Params = params or self.params_type()

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """Two bytes each; always exactly this."""
        return 2 * n

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """See `Codec.encode`."""
        out = kernels_for(x).empty_bytes(2 * ctx.n, x)
        encode_values_into(x, self.kind, out)
        return Payload(out), state

    def check(self, payload: Payload, ctx: Context) -> None:
        """The byte count, and that every code is finite; see `Codec.check`."""
        self._codes(payload, ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out += the values; see `Codec.decode_add`."""
        codes = kernels_for(out).to_device(self._codes(payload, ctx), out)
        add_into(out, lambda target: decode_values_add(codes, self.kind, target))

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """Sums need more precision than the values: they are added decoded."""
        return None

    def _codes(self, payload: Payload, ctx: Context) -> Array:
        codes = payload_bytes(payload, 2 * ctx.n, ctx).view(self.kind.dtype)
        check_codes(codes, self.kind, ctx)
        return codes


class Bf16(Fp16):
    """Values rounded to the upper half of float32: 8 bits of precision, the range of float32."""

    params_type: ClassVar[type[Params]] = Bf16Params
    kind: ClassVar[Format] = BF16


def encode_values_into(x: Array, kind: Format, out: Array) -> None:
    """out, bytes, = x rounded to `kind` with no scale."""
    codes = out.view(kind.dtype)
    family_for("dense", x).encode_floats(x, _one(x), max(x.size, 1), kind, codes)


def decode_values_add(codes: Array, kind: Format, out: Array) -> None:
    """out, float32, += the values of the codes."""
    family_for("dense", out).decode_floats_add(codes, _one(out), max(out.size, 1), kind, out)


def _one(like: Array) -> Array:
    return np.ones_like(like, np.float32, shape=(min(like.size, 1),))
