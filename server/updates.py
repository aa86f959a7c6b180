"""What pushes do to values: rounds of a synchronous key, single pushes of an asynchronous one, the optimizer. Pure.

A synchronous round is complete when every worker's push is in; then value <- sum, or update(value, sum). Pushes of
later rounds wait in rounds of their own; repeated ones are ignored. An asynchronous push is applied at once, each
worker's in its own order. A failing optimizer leaves the value as it is; whoever waits for that round is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from kvstore.compression.codec import Context, Payload
from kvstore.compression.registry import codec_named
from kvstore.errors import ConfigError, KVStoreError, PeerLeftError, PeerLostError, ProtocolError, ServerError
from kvstore.messages import Frame, Gone, PushEntry, Role
from kvstore.optimizer import Optimizer
from kvstore.server.aggregate import Aggregate, Array, Encoded
from kvstore.server.stored import StoredChunk, StoredKey

RoundOf: TypeAlias = tuple[int, int]
"""(number, pushing rank), the rank being JOINT for a round of all workers."""

MAX_ROUNDS_AHEAD = 256
"""A worker that is further ahead of the slowest one is refused, which bounds the memory of a server."""
KEPT_FAILURES = 16
JOINT = -1
"""Stands for the pushing rank where a round is everybody's."""


class Updates:
    """Applies pushes to stored chunks."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.optimizer: Optimizer[Any] | None = None

    def push(self, stored: StoredKey, chunk: StoredChunk, rank: int, entry: PushEntry, frame: Frame) -> None:
        """Take one encoded chunk; apply what it completes.

        Raises:
            PayloadError, ProtocolError, ConfigError: it is refused; nothing changed.
        """
        if not 0 <= rank < self.num_workers:
            raise ProtocolError(f"push of rank {rank}, the job has ranks 0 to {self.num_workers - 1}")
        done = chunk.round if stored.sync else chunk.pushed.get(rank, 0)
        if entry.round <= done or (stored.sync and self._has(chunk, entry.round, rank)):
            return
        if entry.round > done + MAX_ROUNDS_AHEAD:
            raise ProtocolError(
                f"rank {rank} pushes round {entry.round} of key {entry.key!r}, round {done + 1} is not complete: "
                f"no worker may be more than {MAX_ROUNDS_AHEAD} rounds ahead",
                key=entry.key, rank=rank,
            )  # fmt: skip
        codec = codec_named(entry.codec)
        context = Context(
            key=entry.key, n=chunk.value.size, chunk=chunk.index, offset=chunk.start, rank=rank, round=entry.round,
            dtype=chunk.value.dtype,
        )  # fmt: skip
        chunk.failures.pop((entry.round, rank), None)
        push = Encoded(codec, Payload(frame, entry.meta), context)
        stored.count_push(context.n, push.payload.nbytes)
        if stored.sync:
            open_round = chunk.open_round(entry.round)
            open_round.aggregate.add(push)
            open_round.refused.pop(rank, None)
            self._complete_rounds(stored, chunk)
        else:
            self._push_at_once(stored, chunk, push)

    def refuse(self, stored: StoredKey, chunk: StoredChunk, rank: int, number: int, error: KVStoreError) -> None:
        """That push of `rank` does not come, for this reason: who waits for it is told, until it comes after all."""
        if not 0 <= rank < self.num_workers:
            return
        if not stored.sync:
            chunk.failures[number, rank] = error
        elif chunk.round < number <= chunk.round + MAX_ROUNDS_AHEAD and not self._has(chunk, number, rank):
            chunk.open_round(number).refused[rank] = error

    def missing(self, chunk: StoredChunk) -> list[int]:
        """Ranks whose push the next round still lacks."""
        there = chunk.open[chunk.round + 1].aggregate.ranks if chunk.round + 1 in chunk.open else ()
        return [rank for rank in range(self.num_workers) if rank not in there]

    def obstacle(
        self, stored: StoredKey, chunk: StoredChunk, gone: dict[int, Gone], rank: int = JOINT
    ) -> KVStoreError | None:
        """Why the next round (of an asynchronous key: the next push of `rank`) cannot complete; None if it can.

        `gone`: workers that are out.
        """
        if not stored.sync:
            return chunk.failures.get((chunk.pushed.get(rank, 0) + 1, rank))
        refused = chunk.open[chunk.round + 1].refused if chunk.round + 1 in chunk.open else {}
        for rank in self.missing(chunk):
            if rank in refused:
                return refused[rank]
            if rank in gone:
                return _gone_error(stored, chunk, gone[rank])
        return None

    def install(self, optimizer: Optimizer[Any], keys: Iterable[StoredKey]) -> None:
        """Use this optimizer from now on, with fresh state."""
        self.optimizer = optimizer
        for stored in keys:
            stored.state = None
            for chunk in stored.chunks.values():
                chunk.state, chunk.step = None, 0

    @staticmethod
    def _has(chunk: StoredChunk, number: int, rank: int) -> bool:
        return number in chunk.open and rank in chunk.open[number].aggregate

    def _complete_rounds(self, stored: StoredKey, chunk: StoredChunk) -> None:
        while chunk.round + 1 in chunk.open:
            aggregate = chunk.open[chunk.round + 1].aggregate
            if len(aggregate.ranks) < self.num_workers:
                return
            del chunk.open[chunk.round + 1]
            total = aggregate.finish(writable=self.optimizer is not None or stored.average)
            if stored.average:
                total = _divided(total, self.num_workers)
            self._apply(stored, chunk, total, (chunk.round + 1, JOINT))

    def _push_at_once(self, stored: StoredKey, chunk: StoredChunk, push: Encoded) -> None:
        if self.optimizer is None:
            raise ConfigError(
                f"key {chunk.key!r}: an asynchronous push needs an optimizer on the servers; call set_optimizer first",
                key=chunk.key, rank=push.context.rank,
            )  # fmt: skip
        push.codec.check(push.payload, push.context)
        rank = push.context.rank
        chunk.early[rank, push.context.round] = push
        while (waiting := chunk.early.pop((rank, chunk.pushed.get(rank, 0) + 1), None)) is not None:
            aggregate = Aggregate(chunk.value.dtype)
            aggregate.add(waiting)
            self._apply(stored, chunk, aggregate.finish(), (waiting.context.round, rank))

    def _apply(self, stored: StoredKey, chunk: StoredChunk, total: Array, number: RoundOf) -> None:
        if self.optimizer is None or not stored.whole:
            error = self._update_chunk(stored, chunk, total)
            _finish(chunk, number, error)
            return
        sums = stored.sums.setdefault(number, {})
        sums[chunk.index] = total
        if len(sums) == len(stored.chunks):
            del stored.sums[number]
            error = self._update_whole(stored, sums)
            for part in stored.chunks.values():
                _finish(part, number, error)

    def _update_chunk(self, stored: StoredKey, chunk: StoredChunk, total: Array) -> KVStoreError | None:
        if self.optimizer is None:
            chunk.publish(total)
            return None
        try:
            if chunk.state is None:
                chunk.state = self.optimizer.create_state(total.size, total.dtype)
            place = (stored.key, stored.shape, chunk.start)
            new = self.optimizer.update(*place, chunk.master, total, chunk.state, chunk.step + 1)
            chunk.publish(_checked_update(new, chunk.master))
        except Exception as error:  # own rules run here: whatever they raise is the pushing users' to see
            return _update_error(stored, error)
        chunk.step += 1
        return None

    def _update_whole(self, stored: StoredKey, sums: dict[int, Array]) -> KVStoreError | None:
        assert self.optimizer is not None
        chunks = [stored.chunks[index] for index in sorted(stored.chunks)]
        value = np.concatenate([chunk.master for chunk in chunks])
        total = np.concatenate([sums[chunk.index] for chunk in chunks])
        try:
            if stored.state is None:
                stored.state = self.optimizer.create_state(total.size, total.dtype)
            new = self.optimizer.update(stored.key, stored.shape, 0, value, total, stored.state, chunks[0].step + 1)
            new = _checked_update(new, value)
        except Exception as error:  # as above
            return _update_error(stored, error)
        for chunk in chunks:
            part = slice(chunk.start, chunk.start + chunk.value.size)
            chunk.publish(new[part])
            chunk.state = {name: array[part] for name, array in stored.state.items()}
            chunk.step += 1
        return None


def _divided(total: Array, count: int) -> Array:
    divide = np.divide if total.dtype.kind == "f" else np.floor_divide
    divide(total, total.dtype.type(count), out=total)
    return total


def _finish(chunk: StoredChunk, number: RoundOf, error: KVStoreError | None) -> None:
    done, rank = number
    if rank == JOINT:
        chunk.round = done
    else:
        chunk.pushed[rank] = done
    if error is not None:
        chunk.failures[done, rank] = error
        for oldest in sorted(chunk.failures)[:-KEPT_FAILURES]:
            del chunk.failures[oldest]


def _checked_update(new: Array, value: Array) -> Array:
    if not isinstance(new, np.ndarray) or new.shape != value.shape or new.dtype != value.dtype:
        raise ServerError(f"update must return a new array of shape {value.shape} and dtype {value.dtype}")
    if np.may_share_memory(new, value):
        raise ServerError("update returned the old value's memory, which readers may still hold: return a new array")
    return new


def _update_error(stored: StoredKey, error: Exception) -> ServerError:
    return ServerError(
        f"the optimizer failed on key {stored.key!r}: {type(error).__name__}: {error}; the value is unchanged",
        key=stored.key,
    )


def _gone_error(stored: StoredKey, chunk: StoredChunk, gone: Gone) -> KVStoreError:
    pushed = [number for number, open_round in chunk.open.items() if gone.rank in open_round.aggregate]
    rounds = max([chunk.round, *pushed])
    what = f"worker {gone.rank}"
    if gone.lost:
        return PeerLostError(
            f"{what} was lost (last heard of {gone.age:.1f} s before) after round {rounds} of key {stored.key!r}; "
            f"round {chunk.round + 1} cannot complete",
            role=Role.WORKER.value, rank=gone.rank, age=gone.age, key=stored.key,
        )  # fmt: skip
    return PeerLeftError(
        f"{what} left after round {rounds} of key {stored.key!r}, so round {chunk.round + 1} cannot complete: "
        f"give every worker the same number of rounds",
        role=Role.WORKER.value, rank=gone.rank, rounds=rounds, key=stored.key,
    )  # fmt: skip
