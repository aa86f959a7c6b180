"""2-bit compression: each element sends +t, -t or nothing; what is left unsent stays in the residual.

The rule and the bytes are those of MXNet 1.9.1 (apache/mxnet pull request 8662), bit for bit; the bytes are
described in `kernels_numpy`. The threshold travels with each payload. Sums of payloads with the same
threshold are counted as integers and multiplied once, so they do not depend on the order.
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
    parameter_error,
    payload_bytes,
    payload_number,
)
from kvstore.compression.kernels import kernels_for
from kvstore.compression.kernels_numpy import MOST_SUMMED, packed_size
from kvstore.errors import PayloadError

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class TwoBitParams(Params, frozen=True, tag=CompressionType.TWO_BIT.value):
    """threshold: what one element sends per push; match it to the scale of the gradient."""

    threshold: Annotated[float, msgspec.Meta(gt=0)] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _SMALLEST <= self.threshold <= _LARGEST:
            allowed = f"a finite number > 0 within float32, {_SMALLEST:.3g} to {_LARGEST:.3g}"
            raise parameter_error("threshold", self.threshold, allowed)


class TwoBit:
    """MXNet's 2-bit compression: +t, -t or nothing per element.

    The operator alone; error feedback comes from outside, through `encode_feedback` in one pass.
    """

    params_type: ClassVar[type[Params]] = TwoBitParams
    unit: ClassVar[Literal["chunk", "key"]] = "chunk"
    unbiased: ClassVar[bool] = False
    contraction: ClassVar[bool] = True
    linear: ClassVar[bool] = False  # sums of codes do not fit two bits: see `accumulate`
    accumulates: ClassVar[bool] = False
    feedback: ClassVar[bool] = True

    def __init__(self, params: TwoBitParams | None = None) -> None:
        own = params or TwoBitParams()
        self.params: Params = own
        self.threshold = own.threshold

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """16 elements in 4 bytes, whatever the key's dtype; always exactly this."""
        return packed_size(n)

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """Encode without memory: as with a residual of zero that is thrown away."""
        return self.encode_feedback(x, np.zeros_like(x), state, ctx)

    def encode_feedback(
        self, x: Array, residual: Array, state: State | None, ctx: Context
    ) -> tuple[Payload, State | None]:
        """residual += x, then send one quantum per element out of it, in one pass."""
        kernels = kernels_for(x)
        out = kernels.empty_bytes(packed_size(ctx.n), x)
        kernels.quantise2(x, residual, self.threshold, out)
        return Payload(out, {"threshold": self.threshold}), state

    def check(self, payload: Payload, ctx: Context) -> None:
        """The byte count and the threshold; any bytes of the right number decode. See `Codec.check`."""
        _checked(payload, ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out += the decoded values; see `Codec.decode_add`."""
        self.accumulate([payload], out, [ctx])

    def decode_into(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out = the decoded values, faster than filling with zero and adding."""
        kernels = kernels_for(out)
        data, threshold = _checked(payload, ctx)
        target = out if _direct(out) else np.empty_like(out, np.float32, order="C")
        kernels.decode2(kernels.to_device(data, out), threshold, target)
        if target is not out:
            out[...] = target

    def accumulate(self, payloads: Sequence[Payload], out: Array, ctxs: Sequence[Context]) -> None:
        """out += the sum of the payloads: in one pass where the thresholds are equal, else one by one in order.

        Raises:
            PayloadError: before out is changed.
        """
        checked = [_checked(payload, ctx) for payload, ctx in zip(payloads, ctxs, strict=True)]
        kernels = kernels_for(out)
        target = out if _direct(out) else np.zeros_like(out, np.float32, order="C")
        for group, threshold in _groups(checked):
            data = [kernels.to_device(one, out) for one in group]
            if len(data) == 1:
                kernels.decode2_add(data[0], threshold, target)
            else:
                kernels.decode2_add_many(data, threshold, target)
        if target is not out:
            out += target.astype(out.dtype)

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """A sum of codes does not fit two bits."""
        return None


def _checked(payload: Payload, ctx: Context) -> tuple[Array, float]:
    data = payload_bytes(payload, packed_size(ctx.n), ctx)
    threshold = payload_number(payload, "threshold", ctx)
    if not _SMALLEST <= threshold <= _LARGEST:
        text = f"{ctx}: the payload's threshold is {threshold}, allowed is {_SMALLEST:.3g} to {_LARGEST:.3g}"
        raise PayloadError(text, key=ctx.key, rank=ctx.rank)
    return data, threshold


def _direct(out: Array) -> bool:
    """Whether a kernel can write to `out` itself: float32, contiguous, aligned."""
    return out.dtype == np.float32 and bool(out.flags.c_contiguous) and getattr(out.flags, "aligned", True)


def _groups(checked: Sequence[tuple[Array, float]]) -> list[tuple[list[Array], float]]:
    """One group per threshold if there is one only, else one per payload; at most 127 in each."""
    if len({threshold for _, threshold in checked}) > 1:
        return [([data], threshold) for data, threshold in checked]
    return [
        ([data for data, _ in checked[start : start + MOST_SUMMED]], checked[start][1])
        for start in range(0, len(checked), MOST_SUMMED)
    ]
