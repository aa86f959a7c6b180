"""The sum of one chunk's pushes of one round, taken in rank order whatever the order of arrival.

Raw pushes are added as soon as all lower ranks are in, so that at most the out-of-order ones are held. Encoded ones
stay encoded until the round is complete and are then decoded and summed in one pass.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.compression.codec import Accumulating, Codec, Context, Payload
from kvstore.compression.none import NoneCodec
from kvstore.dtypes import accumulator
from kvstore.errors import PayloadError

Array: TypeAlias = npt.NDArray[Any]


class Encoded(NamedTuple):
    """A push of one chunk as it arrived."""

    codec: Codec
    payload: Payload
    context: Context


class Aggregate:
    """Pushes of one round. `add` checks a payload whole, so `finish` cannot fail for what it was given."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = accumulator(dtype)
        self._held: dict[int, Encoded] = {}
        self._sum: Array | None = None
        self._next = 0
        self._ranks: set[int] = set()

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks

    @property
    def ranks(self) -> frozenset[int]:
        """Who has pushed."""
        return frozenset(self._ranks)

    def add(self, codec: Codec, payload: Payload, context: Context) -> None:
        """Take the push of `context.rank`.

        Raises:
            PayloadError: the bytes break the codec's format; nothing changed.
        """
        check_payload(codec, payload, context)
        self._held[context.rank] = Encoded(codec, payload, context)
        self._ranks.add(context.rank)
        while self._next in self._held and isinstance(self._held[self._next].codec, NoneCodec):
            self._fold([self._held.pop(self._next)])
            self._next += 1

    def finish(self) -> Array:
        """Return the sum as a new flat array of the accumulator's dtype; the aggregate is used up."""
        waiting = [self._held[rank] for rank in sorted(self._held)]
        self._held.clear()
        for _, group in itertools.groupby(waiting, key=lambda push: type(push.codec)):
            self._fold(list(group))
        assert self._sum is not None
        return self._sum

    def _fold(self, pushes: list[Encoded]) -> None:
        codec, payload, context = pushes[0]
        if self._sum is None and len(pushes) == 1:
            self._sum = np.empty(context.n, self._dtype)
            decode_into(codec, payload, self._sum, context)
            return
        if self._sum is None:
            self._sum = np.zeros(context.n, self._dtype)
        if isinstance(codec, Accumulating):
            codec.accumulate([push.payload for push in pushes], self._sum, [push.context for push in pushes])
        else:
            for codec, payload, context in pushes:
                codec.decode_add(payload, self._sum, context)


def check_payload(codec: Codec, payload: Payload, context: Context) -> None:
    """Raise PayloadError unless `payload` can be decoded as `context.n` elements."""
    if isinstance(codec, Accumulating):
        codec.check(payload, context)
    elif isinstance(codec, NoneCodec):
        if payload.nbytes != codec.max_bytes(context.n, context.dtype):
            raise PayloadError(
                f"{context}: {payload.nbytes} raw bytes, {context.n} elements of {context.dtype} take "
                f"{codec.max_bytes(context.n, context.dtype)}",
                key=context.key, rank=context.rank,
            )  # fmt: skip
    else:
        codec.decode_add(payload, np.zeros(context.n, np.float32), context)


def decode_into(codec: Codec, payload: Payload, out: Array, context: Context) -> None:
    """out = the decoded chunk, directly where the codec offers that."""
    direct = getattr(codec, "decode_into", None)
    if direct is not None and (out.dtype == np.float32 or isinstance(codec, NoneCodec)):
        direct(payload, out, context)
    else:
        out.fill(0)
        codec.decode_add(payload, out, context)
