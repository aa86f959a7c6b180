"""What a server keeps of its keys: values, optimizer state, open rounds. Pure data, and what can be asked of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.dtypes import accumulator
from kvstore.errors import ArrayError, KVStoreError, MismatchError
from kvstore.messages import DeclareEntry, Frame, Key
from kvstore.on_stale import OnStale
from kvstore.server.aggregate import Aggregate, Array

JOINT = -1
"""Stands for the pushing rank where a round is everybody's."""


@dataclass
class OpenRound:
    """A round that lacks pushes. `refused`: ranks that refused to push, and why."""

    aggregate: Aggregate
    refused: dict[int, KVStoreError] = field(default_factory=dict)


@dataclass(eq=False)
class StoredChunk:
    """One chunk of a key.

    `master` (flat, accumulator dtype) is what optimizers see, `value` (flat, the key's dtype) what is pulled; they are
    one array unless the key is half precision. Both may be on their way to workers: they are replaced, never written.
    `kept`: sums of increments, by pushing rank (JOINT: of all). `seen`: updates made when a rank last pulled; `base`:
    when one pulled that never has.
    """

    key: Key
    index: int
    start: int
    master: Array
    value: Array
    epoch: int = 0
    round: int = 0
    step: int = 0
    state: dict[str, Array] | None = None
    pushed: dict[int, int] = field(default_factory=dict)
    open: dict[int, OpenRound] = field(default_factory=dict)
    early: dict[tuple[int, int], Aggregate] = field(default_factory=dict)
    failures: dict[tuple[int, int], KVStoreError] = field(default_factory=dict)
    assigned: int = 0
    """Sequence number of the assignment that set `epoch`."""
    kept: dict[int, Array] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    base: int = 0

    @property
    def span(self) -> slice:
        """Its elements within the key."""
        return slice(self.start, self.start + self.value.size)

    def start_counting(self, step: int) -> None:
        """So many updates were made, all of them before any pull."""
        self.step, self.base = step, step
        self.seen.clear()

    def done(self, rank: int) -> int:
        """Rounds applied: of all workers (JOINT), or pushes of one."""
        return self.round if rank == JOINT else self.pushed.get(rank, 0)

    def publish(self, master: Array) -> None:
        """Replace the value."""
        self.master = master
        self.value = master if master.dtype == self.value.dtype else master.astype(self.value.dtype)

    def open_round(self, number: int) -> OpenRound:
        """The round, opened if need be."""
        return self.open.setdefault(number, OpenRound(Aggregate(self.value.dtype)))

    def frame(self) -> Frame:
        """The value's bytes as they travel."""
        return self.value.view(np.uint8).data


@dataclass(eq=False)
class StoredKey:
    """A key and the chunks of it that lie here.

    `expected`: how many chunks lie here once all are assigned.
    `staleness`, `on_stale`: the bound of an asynchronous key, -1 for none, and what happens beyond it.
    `whole`: all chunks lie here and are updated together; `state` then holds the optimizer's arrays of the whole key,
    `sums` the gradients that wait for the other chunks, by (round, pushing rank or -1).
    """

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    elements: int
    sync: bool
    average: bool
    whole: bool
    expected: int
    staleness: int = -1
    on_stale: str = OnStale.BLOCK
    state: dict[str, Array] | None = None
    chunks: dict[int, StoredChunk] = field(default_factory=dict)
    sums: dict[tuple[int, int], dict[int, Array]] = field(default_factory=dict)
    raw_bytes: int = 0
    received_bytes: int = 0

    @property
    def complete(self) -> bool:
        """Have all chunks that belong here been assigned?"""
        return len(self.chunks) == self.expected

    @property
    def epoch(self) -> int:
        """Assignments that every chunk here has seen."""
        return min((chunk.epoch for chunk in self.chunks.values()), default=0)

    def difference(self, entry: DeclareEntry, rank: int) -> KVStoreError | None:
        """How a worker's view of this key differs from rank 0's."""
        mine = (self.shape, self.dtype.name)
        if mine != (entry.shape, entry.dtype):
            return ArrayError(
                f"key {entry.key!r}: rank {rank} gave shape {entry.shape} and dtype {entry.dtype}, "
                f"rank 0 gave {mine[0]} and {mine[1]}", key=entry.key, rank=rank,
            )  # fmt: skip
        for name, theirs, ours in (
            ("sync", entry.sync, self.sync),
            ("average", entry.average, self.average),
            ("staleness", entry.staleness, self.staleness),
            ("on_stale", entry.on_stale, self.on_stale),
        ):
            if theirs != ours:
                return MismatchError(
                    f"key {entry.key!r}: rank {rank} created its store with {name}={theirs}, rank 0 with {name}={ours}",
                    key=entry.key, rank=rank,
                )  # fmt: skip
        return None

    def validate(self, num_workers: int) -> None:
        """Check the invariants; raises AssertionError. For tests."""
        for index, chunk in self.chunks.items():
            assert (chunk.key, chunk.index) == (self.key, index)
            assert chunk.value.dtype == self.dtype and chunk.master.dtype == accumulator(self.dtype)
            assert chunk.value.shape == chunk.master.shape, "a value that is not of its chunk"
            assert all(number > chunk.round for number in chunk.open), "an applied round is open"
            assert all(number > chunk.done(rank) for rank, number in chunk.early), "an applied push waits"
            there = chunk.open[chunk.round + 1].aggregate.ranks if chunk.round + 1 in chunk.open else ()
            assert len(there) < num_workers, "a complete round is not applied"
        for (number, rank), sums in self.sums.items():
            assert len(sums) < self.expected, "a complete sum is not applied"
            assert all(number == self.chunks[index].done(rank) + 1 for index in sums), "a sum of another round waits"

    @property
    def spread(self) -> bool:
        """Has it more than one chunk, here or elsewhere?"""
        return any(chunk.value.size < self.elements for chunk in self.chunks.values())

    def count_push(self, elements: int, received: int) -> None:
        """Count a push: what it would take raw, and what arrived."""
        self.raw_bytes += elements * self.dtype.itemsize
        self.received_bytes += received
