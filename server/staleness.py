"""Bounded staleness of asynchronous keys: who waits, what is dropped or scaled, and a count of it all. Pure.

A push is k - v updates old if k updates were made when it is applied and v when its worker's last pull was answered.
Under `block` (stale synchronous parallel: Ho et al. 2013) what counts is rounds: the pull of a worker that has pushed c
times waits while the slowest live worker has pushed less than c - T times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvstore.on_stale import OnStale
from kvstore.server.stored import JOINT, StoredChunk, StoredKey

MOST = 1024
"""Pushes that are this many updates old or older are counted together."""


class Staleness:
    """Decides how much of a push counts, and keeps the histogram."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.dropped = 0
        self.scaled = 0

    def factor(self, stored: StoredKey, chunks: Sequence[StoredChunk], rank: int) -> float:
        """What to multiply a push of `rank` by, 0 to drop it; `chunks`: those that are updated together."""
        if rank == JOINT:
            return 1.0
        old = max(chunk.step - chunk.seen.get(rank, chunk.base) for chunk in chunks)
        self._counts[min(max(old, 0), MOST)] += 1
        if stored.staleness < 0 or old <= stored.staleness or stored.on_stale == OnStale.BLOCK:
            return 1.0
        if stored.on_stale == OnStale.DROP:
            self.dropped += 1
            return 0.0
        self.scaled += 1
        return stored.staleness / old

    def histogram(self) -> list[tuple[int, int]]:
        """(updates, pushes that were so old), ascending."""
        return sorted(self._counts.items())


def behind(stored: StoredKey, chunk: StoredChunk, rank: int, ranks: Iterable[int]) -> dict[int, int]:
    """Ranks that `rank` must wait for before it goes on, with the rounds they have pushed; `ranks`: who counts."""
    if stored.sync or stored.staleness < 0 or stored.on_stale != OnStale.BLOCK:
        return {}
    least = chunk.done(rank) - stored.staleness
    if least <= 0:
        return {}
    return {other: done for other in ranks if (done := chunk.done(other)) < least}
