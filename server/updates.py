"""What pushes do to values: rounds of a synchronous key, single pushes of an asynchronous one, the optimizer. Pure.

A synchronous round is complete when every worker's push is in; then value <- sum, or update(value, sum). Pushes of
later rounds wait in rounds of their own; repeated ones are ignored. An asynchronous push is applied at once, each
worker's in its own order, unless it is too stale (`staleness`). A failing optimizer leaves the value as it is; whoever
waits for that round is told. A push of a whole key stands for one of every chunk.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import numpy as np

from kvstore.compression.codec import Context, Payload
from kvstore.compression.none import NoneCodec
from kvstore.compression.registry import codec_named
from kvstore.errors import (
    ArrayError,
    ConfigError,
    KVStoreError,
    PeerLeftError,
    PeerLostError,
    ProtocolError,
    ServerError,
)
from kvstore.messages import Frame, Gone, PushEntry, Role
from kvstore.optimizer import Optimizer
from kvstore.server.aggregate import Aggregate, Array, Encoded, WholeRound
from kvstore.server.staleness import Staleness, behind
from kvstore.server.stored import JOINT, StoredChunk, StoredKey

MAX_ROUNDS_AHEAD = 256
"""Pushes of a worker that is further ahead of the slowest one are left where they are: with that worker."""
KEPT_FAILURES = 16
INTEGERS = "biu"
"""Kinds of element types that travel raw and that no optimizer updates."""


class Updates:
    """Applies pushes to stored chunks."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.optimizer: Optimizer[Any] | None = None
        self.staleness = Staleness()

    @property
    def needs_whole(self) -> bool:
        """Does the installed optimizer need arrays whole?"""
        return self.optimizer is not None and self.optimizer.whole

    @np.errstate(all="ignore")  # whether infinity may come here is decided where gradients enter
    def push(self, stored: StoredKey, chunk: StoredChunk, rank: int, entry: PushEntry, frame: Frame) -> None:
        """Take one encoded chunk; apply what it completes.

        Raises:
            PayloadError, ProtocolError, ConfigError: it is refused; nothing changed.
        """
        if not 0 <= rank < self.num_workers:
            raise ProtocolError(f"push of rank {rank}, the job has ranks 0 to {self.num_workers - 1}")
        whose = JOINT if stored.sync else rank
        chunks = _all_chunks(stored, entry, rank) if entry.whole else [chunk]
        done = min(part.done(whose) for part in chunks)
        if any(entry.round <= part.done(whose) or self._has(stored, part, entry.round, rank) for part in chunks):
            return
        if entry.round > done + MAX_ROUNDS_AHEAD:
            return  # not acknowledged either: it comes again
        codec = codec_named(entry.codec)
        if chunk.value.dtype.kind in INTEGERS and not isinstance(codec, NoneCodec):
            raise ProtocolError(
                f"rank {rank} pushes key {entry.key!r}, which holds {chunk.value.dtype}, as {entry.codec}: integers "
                f"travel raw", key=entry.key, rank=rank,
            )  # fmt: skip
        context = Context(
            key=entry.key, n=stored.elements if entry.whole else chunk.value.size, chunk=chunk.index,
            offset=chunk.start, rank=rank, round=entry.round, dtype=chunk.value.dtype,
        )  # fmt: skip
        push = Encoded(codec, Payload(frame, entry.meta), context)
        self._keep(stored, chunks, push)
        for part in chunks:
            part.failures.pop((entry.round, rank), None)
        stored.count_push(context.n, push.payload.nbytes)
        self._advance(stored, chunks, whose)

    def _keep(self, stored: StoredKey, chunks: list[StoredChunk], push: Encoded) -> None:
        """Add the push to the round of each of these chunks; nothing has changed when this raises."""
        rank, number, codec = push.context.rank, push.context.round, push.codec
        if not stored.sync and self.optimizer is None:
            raise ConfigError(
                f"key {stored.key!r}: an asynchronous push needs an optimizer on the servers; call set_optimizer first",
                key=stored.key, rank=rank,
            )  # fmt: skip
        if codec.unit == "key" and codec.accumulates:
            raise ProtocolError(f"codec {codec.params.type!r} accumulates whole keys, which servers do not", rank=rank)
        opened = [part.open_round(number) for part in chunks] if stored.sync else []
        aggregates = [one.aggregate for one in opened] or [Aggregate(part.value.dtype) for part in chunks]
        if len(chunks) == 1:
            aggregates[0].add(push)
        else:
            whole = aggregates[0].whole or WholeRound(stored.dtype)
            whole.add(push)
            for part, aggregate in zip(chunks, aggregates, strict=True):
                aggregate.join(whole, part.span, rank)
        for one in opened:
            one.refused.pop(rank, None)
        if not stored.sync:
            for part, aggregate in zip(chunks, aggregates, strict=True):
                part.early[rank, number] = aggregate

    def refuse(self, stored: StoredKey, chunk: StoredChunk, rank: int, number: int, error: KVStoreError) -> None:
        """That push of `rank` does not come, for this reason: who waits for it is told, until it comes after all."""
        done = chunk.done(rank if not stored.sync else JOINT)
        if not (0 <= rank < self.num_workers and done < number <= done + MAX_ROUNDS_AHEAD):
            return
        if self._has(stored, chunk, number, rank):
            return
        if stored.sync:
            chunk.open_round(number).refused[rank] = error
        else:
            chunk.failures[number, rank] = error

    def skip(self, stored: StoredKey, chunk: StoredChunk, rank: int, number: int) -> None:
        """An assignment to an asynchronous key stands for the first `number` pushes of `rank`, arrived or not."""
        if stored.sync or not 0 <= rank < self.num_workers or number <= chunk.done(rank):
            return
        chunk.pushed[rank] = number
        chunk.early = {place: push for place, push in chunk.early.items() if place[0] != rank or place[1] > number}
        stored.sums = {place: sums for place, sums in stored.sums.items() if place[1] != rank or place[0] > number}
        self._advance(stored, [chunk], rank)

    def missing(self, stored: StoredKey, chunk: StoredChunk) -> list[int]:
        """Ranks whose push the next round of a synchronous key still lacks."""
        return sorted({rank for part in _unsummed(stored, chunk) for rank in self._missing(part)})

    def behind(self, stored: StoredKey, chunk: StoredChunk, rank: int, gone: Container[int]) -> dict[int, int]:
        """Ranks that `rank` must let catch up before it goes on, with the rounds they have pushed."""
        return behind(stored, chunk, rank, (other for other in range(self.num_workers) if other not in gone))

    def lacking(self, stored: StoredKey, chunk: StoredChunk, rank: int, number: int, gone: Container[int]) -> str:
        """What a pull of `rank` after its push `number` still waits for."""
        if stored.sync:
            ranks = ", ".join(str(rank) for rank in self.missing(stored, chunk))
            return f"round {chunk.round + 1} lacks the push of rank {ranks}"
        if slow := self.behind(stored, chunk, rank, gone):
            listed = ", ".join(f"rank {other} has pushed {done} times" for other, done in slow.items())
            return f"rank {rank} has pushed {number} times, {listed}, allowed is {stored.staleness} less"
        return f"own push {number} has not arrived"

    def _missing(self, chunk: StoredChunk) -> list[int]:
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
        for part in _unsummed(stored, chunk):
            refused = part.open[part.round + 1].refused if part.round + 1 in part.open else {}
            for rank in self._missing(part):
                if rank in refused:
                    return refused[rank]
                if rank in gone:
                    return _gone_error(stored, part, gone[rank])
        return None

    def install(self, optimizer: Optimizer[Any], keys: Iterable[StoredKey]) -> None:
        """Use this optimizer from now on, with fresh state."""
        self.optimizer = optimizer
        for stored in keys:
            stored.state = None
            for chunk in stored.chunks.values():
                chunk.state = None
                chunk.start_counting(0)

    @staticmethod
    def _has(stored: StoredKey, chunk: StoredChunk, number: int, rank: int) -> bool:
        if chunk.index in stored.sums.get((number, JOINT if stored.sync else rank), ()):
            return True
        if stored.sync:
            return number in chunk.open and rank in chunk.open[number].aggregate
        return (rank, number) in chunk.early

    def _advance(self, stored: StoredKey, chunks: list[StoredChunk], rank: int) -> None:
        """Apply what is ready of `rank` (JOINT: of all), round after round, in every chunk that this sets going."""
        ready = chunks
        while ready:
            totals = [(part, total) for part in ready if (total := self._total(stored, part, rank)) is not None]
            ready = [other for part, total in totals for other in self._apply(stored, part, total, rank)]

    def _total(self, stored: StoredKey, chunk: StoredChunk, rank: int) -> Array | None:
        """The sum of the next round, taken out of what waits, if it is complete."""
        number = chunk.done(rank) + 1
        if rank != JOINT:
            aggregate = chunk.early.pop((rank, number), None)
        elif number in chunk.open and len(chunk.open[number].aggregate.ranks) == self.num_workers:
            aggregate = chunk.open.pop(number).aggregate
        else:
            aggregate = None
        if aggregate is None:
            return None
        writable = self.optimizer is not None or stored.average
        total = aggregate.finish(writable, chunk.kept.pop(rank, None))
        if aggregate.kept is not None:
            chunk.kept[rank] = aggregate.kept
        return _divided(total, self.num_workers) if stored.average and rank == JOINT else total

    def _apply(self, stored: StoredKey, chunk: StoredChunk, total: Array, rank: int) -> list[StoredChunk]:
        """Update the value, of a whole key once the sums of all chunks are there; return the chunks that went on."""
        number = chunk.done(rank) + 1
        if self.optimizer is None or not stored.whole:
            factor = self.staleness.factor(stored, [chunk], rank)
            _finish(chunk, number, rank, self._update_chunk(stored, chunk, total, factor))
            return [chunk]
        sums = stored.sums.setdefault((number, rank), {})
        sums[chunk.index] = total
        if len(sums) < stored.expected:
            return []
        del stored.sums[number, rank]
        factor = self.staleness.factor(stored, list(stored.chunks.values()), rank)
        error = self._update_whole(stored, sums, factor)
        for part in stored.chunks.values():
            _finish(part, number, rank, error)
        return list(stored.chunks.values())

    def _update_chunk(self, stored: StoredKey, chunk: StoredChunk, total: Array, factor: float) -> KVStoreError | None:
        if self.optimizer is None:
            chunk.publish(total)
            return None
        if factor == 0:
            return None
        if stored.dtype.kind in INTEGERS:
            return _no_float_error(stored)
        try:
            if chunk.state is None:
                chunk.state = self.optimizer.create_state(total.size, total.dtype)
            if factor != 1:
                total *= total.dtype.type(factor)
            place = (stored.key, stored.shape, chunk.start)
            new = self.optimizer.update(*place, chunk.master, total, chunk.state, chunk.step + 1)
            chunk.publish(_checked_update(new, chunk.master))
        except Exception as error:  # own rules run here: whatever they raise is the pushing users' to see
            return _update_error(stored, error)
        chunk.step += 1
        return None

    def _update_whole(self, stored: StoredKey, sums: dict[int, Array], factor: float) -> KVStoreError | None:
        assert self.optimizer is not None
        if factor == 0:
            return None
        if stored.dtype.kind in INTEGERS:
            return _no_float_error(stored)
        chunks = [stored.chunks[index] for index in sorted(stored.chunks)]
        value = np.concatenate([chunk.master for chunk in chunks])
        total = np.concatenate([sums[chunk.index] for chunk in chunks])
        if factor != 1:
            total *= total.dtype.type(factor)
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


def _all_chunks(stored: StoredKey, entry: PushEntry, rank: int) -> list[StoredChunk]:
    """What a push of the whole key stands for.

    Raises:
        ConfigError: other servers hold a part of it.
    """
    chunks = [stored.chunks[index] for index in sorted(stored.chunks)]
    if sum(chunk.value.size for chunk in chunks) != stored.elements or chunks[0].index != entry.chunk:
        raise ConfigError(
            f"rank {rank} pushes key {entry.key!r} whole, as {entry.codec}, but its chunks lie on several servers: "
            f"call set_gradient_compression before init, or give the key another codec by per_key",
            key=entry.key, rank=rank,
        )  # fmt: skip
    return chunks


def _divided(total: Array, count: int) -> Array:
    """total / count, rounded down where it holds integers; a logical or stays one."""
    if total.dtype.kind == "f":
        np.divide(total, total.dtype.type(count), out=total)
    elif total.dtype.itemsize < 8 and total.dtype.kind != "b":  # too small for `count`, perhaps
        total = np.floor_divide(total, count, dtype=np.int64).astype(total.dtype)
    elif total.dtype.kind != "b":
        np.floor_divide(total, total.dtype.type(count), out=total)
    return total


def _unsummed(stored: StoredKey, chunk: StoredChunk) -> list[StoredChunk]:
    """Chunks that the next round of this one waits for: itself, or others of a key that is updated whole."""
    summed = stored.sums.get((chunk.round + 1, JOINT), {})
    return [part for part in stored.chunks.values() if part.index not in summed] if chunk.index in summed else [chunk]


def _finish(chunk: StoredChunk, done: int, rank: int, error: KVStoreError | None) -> None:
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


def _no_float_error(stored: StoredKey) -> ArrayError:
    return ArrayError(
        f"key {stored.key!r} holds {stored.dtype.name}; optimizers need a floating point key; the value is unchanged",
        key=stored.key,
    )


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
