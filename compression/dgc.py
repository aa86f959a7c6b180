"""Deep gradient compression: only the largest elements of what has gathered are sent (Lin et al. 2018).

arXiv:1712.01887. The paper's four parts and where they are: momentum correction (section 3.2, u = m u + g, v = v + u)
is done by the encoder for every codec with `momentum`; v is the residual of error feedback, so it is kept over changes
of setting; momentum factor masking (u = 0 where something was sent) and local clipping are asked for here
(`MaskingMomentum`); warm-up (section 3.3) is the share of elements by round. The optimizer on the servers must have no
momentum of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np

from kvstore.compression import sparse
from kvstore.compression.codec import Array, CompressionType, Context, Params, Payload, State

_STAGE = 0.25
"""Of warm-up: each stage sends a quarter of the one before (75 %, 93.75 %, 98.4 %, 99.6 % are left out)."""


class DgcParams(Params, frozen=True, tag=CompressionType.DGC.value):
    """The defaults are the paper's.

    ratio: share of the elements that is sent. momentum: as of all codecs, but 0.9.
    clip: largest l2 norm of one worker's gradient of a key before the momentum, 0 for none; the paper takes the norm
        for one machine times N ** -0.5 for N workers.
    warmup_stages: stages that send 1/4, 1/16, ... of the elements first. stage_rounds: rounds in each, an epoch's.
    """

    ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.001
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    clip: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    warmup_stages: Annotated[int, msgspec.Meta(ge=0, le=16)] = 4
    stage_rounds: Annotated[int, msgspec.Meta(ge=1)] = 100


class Dgc:
    """Deep gradient compression: the largest elements after momentum correction, with warm-up."""

    params_type: ClassVar[type[Params]] = DgcParams
    unit: ClassVar[Literal["chunk", "key"]] = "chunk"
    unbiased: ClassVar[bool] = False
    contraction: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    feedback: ClassVar[bool] = True

    def __init__(self, params: DgcParams | None = None) -> None:
        self.own = params or DgcParams()
        self.params: Params = self.own

    def ratio_at(self, round: int) -> float:
        """The share that is sent in a round, the first being 1; rounds that travel raw come before the stages."""
        stage = max(0, round - 1 - self.own.warmup_rounds) // self.own.stage_rounds
        return max(self.own.ratio, _STAGE ** (stage + 1)) if stage < self.own.warmup_stages else self.own.ratio

    def clipped(self, norm: float) -> float:
        """See `MaskingMomentum`."""
        return self.own.clip / norm if 0 < self.own.clip < norm else 1.0

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """The first stage sends most."""
        return sparse.PAIR * sparse.count(n, max(self.ratio_at(1), self.own.ratio))

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """The largest elements; what they are taken from is the residual's to keep."""
        payload, _ = sparse.encode_top(x, sparse.count(ctx.n, self.ratio_at(ctx.earlier + ctx.round)))
        return payload, state

    def check(self, payload: Payload, ctx: Context) -> None:
        """See `Codec.check`."""
        sparse.check(payload, ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """See `Codec.decode_add`."""
        sparse.decode_add(payload, out, ctx)

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """Sums of sparse payloads grow; servers decode them."""
        return None
