"""The raw codec: little-endian bytes of the key's own dtype. Allowed per key, refused at top level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from kvstore.compression.codec import Array, CompressionType, Context, Params, Payload, State, payload_bytes
from kvstore.compression.kernels import mover_for


class NoneParams(Params, frozen=True, tag=CompressionType.NONE.value):
    """Raw has no parameters of its own."""


class NoneCodec:
    """Sends the values as they are. Any dtype; decoding adds in the dtype of `out`."""

    params_type: ClassVar[type[Params]] = NoneParams
    unit: ClassVar[Literal["chunk", "key"]] = "chunk"
    unbiased: ClassVar[bool] = True
    contraction: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    feedback: ClassVar[bool] = False

    def __init__(self, params: NoneParams | None = None) -> None:
        self.params: Params = params or NoneParams()

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """n elements at the key's own size."""
        return n * dtype.itemsize

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """A view of `x` where it is already in the key's dtype and byte order, else a converted copy."""
        wire = ctx.dtype.newbyteorder("<")
        return Payload(x.astype(wire, copy=False).view(np.uint8)), state

    def check(self, payload: Payload, ctx: Context) -> None:
        """The byte count must be n times the size of the key's dtype; see `Codec.check`."""
        payload_bytes(payload, self.max_bytes(ctx.n, ctx.dtype), ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out += the values, which may be of a narrower dtype than out."""
        values = self.values(payload, ctx, out)
        with np.errstate(over="ignore", invalid="ignore"):  # raw values are the sender's, whatever they are
            out += values.astype(out.dtype, copy=False)

    def decode_into(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out = the values."""
        values = self.values(payload, ctx, out)
        with np.errstate(over="ignore", invalid="ignore"):
            out[...] = values

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """Raw values are added where they are decoded, in a wider dtype; never here."""
        return None

    def values(self, payload: Payload, ctx: Context, like: Array) -> Array:
        """The `ctx.n` values, where `like` lies.

        Raises:
            PayloadError: the byte count is not n times the size of the key's dtype.
        """
        data = payload_bytes(payload, self.max_bytes(ctx.n, ctx.dtype), ctx)
        return mover_for(like).to_device(data, like).view(ctx.dtype.newbyteorder("<"))
