"""EF21: workers send the largest elements of how their gradient changed (Richtarik et al. 2021, arXiv:2106.05203).

Worker i keeps g_i, what the servers know of its gradient, and sends c = top(gradient - g_i); then g_i = g_i + c. The
servers keep the sum of all g_i, add the increments of a round to it, and take the sum as the round's gradient. So it is
another kind of error feedback, and none is wrapped around it.

The sum and the g_i must match: both start from zero at `init`, `broadcast` and a change to this codec, both are saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np

from kvstore.compression import sparse
from kvstore.compression.codec import (
    Array,
    CompressionType,
    Context,
    Feedback,
    OnNonFinite,
    Params,
    Payload,
    State,
    parameter_error,
)


class Ef21Params(Params, frozen=True, tag=CompressionType.EF21.value):
    """ratio: share of the elements that is sent."""

    ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_nonfinite is OnNonFinite.PROPAGATE:
            raise parameter_error("on_nonfinite", "propagate", "refuse with ef21: NaN would stay in the servers' sum")
        if self.error_feedback is Feedback.ON:
            raise parameter_error("error_feedback", "on", "auto or off with ef21, which is error feedback itself")


class Ef21:
    """The largest elements of the gradient's change; the servers keep the sum of all that was sent."""

    params_type: ClassVar[type[Params]] = Ef21Params
    unit: ClassVar[Literal["chunk", "key"]] = "chunk"
    unbiased: ClassVar[bool] = False
    contraction: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    accumulates: ClassVar[bool] = True
    feedback: ClassVar[bool] = False

    def __init__(self, params: Ef21Params | None = None) -> None:
        self.own = params or Ef21Params()
        self.params: Params = self.own

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """Always exactly this."""
        return sparse.PAIR * sparse.count(n, self.own.ratio)

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """The increment; `state` holds `sent`, float32 of n elements."""
        sent = np.zeros_like(x) if state is None else state["sent"]
        with np.errstate(over="ignore"):
            change = x - sent
        payload, _ = sparse.encode_top(change, sparse.count(ctx.n, self.own.ratio))
        sparse.decode_add(payload, sent, ctx)
        return payload, {"sent": sent}

    def check(self, payload: Payload, ctx: Context) -> None:
        """See `Codec.check`."""
        sparse.check(payload, ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Add the increment; see `Codec.decode_add`."""
        sparse.decode_add(payload, out, ctx)

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """Sums of sparse payloads grow; servers decode them."""
        return None
