"""The sum of one chunk's pushes of one round, taken in rank order whatever the order of arrival.

Raw pushes are added as soon as all lower ranks are in, so that at most the out-of-order ones are held. Encoded ones
stay encoded until the round is complete and are then decoded and summed in one pass. Pushes that encode a whole key
are summed once for all of its chunks. Increments (codecs that accumulate) are added to the sum that is kept of them.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvstore.compression.codec import Accumulating, Codec, Context, Payload
from kvstore.compression.none import NoneCodec
from kvstore.dtypes import accumulator

Array: TypeAlias = npt.NDArray[Any]


KEPT_WHERE_IT_ARRIVED = 65536
"""Smaller payloads share ZeroMQ's receive buffers, which they would keep alive: those are copied."""


class Encoded(NamedTuple):
    """A push of one chunk as it arrived."""

    codec: Codec
    payload: Payload
    context: Context


class WholeRound:
    """Pushes of one round that each encode a whole key of several chunks; decoded once, when the first chunk asks."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._pushes = Aggregate(dtype)
        self._sum: Array | None = None

    def add(self, push: Encoded) -> None:
        """Take the push of one rank. Raises PayloadError."""
        self._pushes.add(push)

    def part(self, span: slice) -> Array:
        """The sum of some elements; shares memory with that of the others, so it must not be written."""
        if self._sum is None:
            self._sum = self._pushes.finish(writable=False)
        return self._sum[span]


class Aggregate:
    """Pushes of one round. `add` checks a payload whole, so `finish` cannot fail for what it was given."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = accumulator(dtype)
        self._held: dict[int, Encoded] = {}
        self._sum: Array | None = None
        self._owned = False
        self._next = 0
        self._span = slice(0, 0)
        self.kept: Array | None = None
        self.whole: WholeRound | None = None
        """Pushes of whole keys, of which this chunk is a part."""
        self.ranks: set[int] = set()
        """Who has pushed."""

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks

    def add(self, push: Encoded) -> None:
        """Take the push of one rank.

        Raises:
            PayloadError: the bytes break the codec's format; nothing changed.
        """
        push.codec.check(push.payload, push.context)
        self._held[push.context.rank] = push
        self.ranks.add(push.context.rank)
        while self._next in self._held and isinstance(self._held[self._next].codec, NoneCodec):
            self._fold_raw(self._held.pop(self._next))
            self._next += 1

    def join(self, whole: WholeRound, span: slice, rank: int) -> None:
        """The push of `rank` is among those of the whole key, of which this chunk is the part `span`."""
        self.whole, self._span = whole, span
        self.ranks.add(rank)

    def finish(self, writable: bool = True, kept: Array | None = None) -> Array:
        """Return the sum as a flat array of the accumulator's dtype; the aggregate is used up.

        `kept`: the sum of all increments up to now. Increments of this round are added to it, which gives the new
        `self.kept`, a part of the sum; after a round without increments nothing is kept. With `writable=False` the sum
        may be a push as it arrived, or what is kept, without a copy.
        """
        waiting = [self._held[rank] for rank in sorted(self._held)]
        self._held.clear()
        increments = [push for push in waiting if push.codec.accumulates]
        self.kept = self._accumulated(increments, kept) if increments else None
        self._fold([push for push in waiting if not push.codec.accumulates])
        for other in (self.kept, self.whole.part(self._span) if self.whole is not None else None):
            if other is not None:
                self._sum, self._owned = (other, False) if self._sum is None else (np.add(self._sum, other), True)
        assert self._sum is not None
        if writable:
            self._own()
        return self._sum

    def _accumulated(self, increments: list[Encoded], kept: Array | None) -> Array:
        own = Aggregate(self._dtype)
        own._fold(increments)
        assert own._sum is not None
        return own._sum if kept is None else np.add(kept, own._sum)

    def _fold(self, waiting: list[Encoded]) -> None:
        for kind, group in itertools.groupby(waiting, key=lambda push: type(push.codec)):
            if kind is NoneCodec:
                for push in group:
                    self._fold_raw(push)
            else:
                self._fold_encoded(list(group))

    def _fold_raw(self, push: Encoded) -> None:
        """The first push stays where it arrived, the second is added to it into a new array, later ones in place."""
        values = np.frombuffer(push.payload.data, np.uint8).view(push.context.dtype)
        if self._sum is None:
            self._sum = values
            keep = values.dtype == self._dtype and values.flags.aligned and values.nbytes >= KEPT_WHERE_IT_ARRIVED
            if not keep:
                self._own()
        elif self._owned:
            self._sum += values
        else:
            self._sum, self._owned = np.add(self._sum, values), True

    def _fold_encoded(self, pushes: list[Encoded]) -> None:
        codec, payload, context = pushes[0]
        if self._sum is None and len(pushes) == 1:
            self._sum, self._owned = np.empty(context.n, self._dtype), True
            decode_into(codec, payload, self._sum, context)
            return
        if self._sum is None:
            self._sum, self._owned = np.zeros(context.n, self._dtype), True
        self._own()
        if (counting := as_accumulating(codec)) is not None:
            counting.accumulate([push.payload for push in pushes], self._sum, [push.context for push in pushes])
        else:
            for push in pushes:
                push.codec.decode_add(push.payload, self._sum, push.context)

    def _own(self) -> None:
        if not self._owned and self._sum is not None:
            self._sum, self._owned = self._sum.astype(self._dtype), True


def as_accumulating(codec: Codec) -> Accumulating | None:
    """The codec as one that counts, None if it does not."""
    return cast(Accumulating, codec) if _accumulates(type(codec)) else None


@functools.cache
def _accumulates(kind: type[Codec]) -> bool:
    return issubclass(kind, Accumulating)  # asked for every chunk, and slow to find out


def decode_into(codec: Codec, payload: Payload, out: Array, context: Context) -> None:
    """out = the decoded chunk, directly where the codec offers that."""
    direct = getattr(codec, "decode_into", None)
    if direct is not None and out.dtype == np.float32:
        direct(payload, out, context)
    else:
        out.fill(0)
        codec.decode_add(payload, out, context)
