"""One server's machine: the keys and chunks it holds, who pushes to them and who waits for them. Pure.

A chunk belongs to one shard and a shard to one thread, so nothing is locked. Requests are answered at once where they
can be, else kept in `Waiting` until the chunk, the key or the job changes, or their deadline passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.compression.policy import policy_from_json
from kvstore.config import Config
from kvstore.dtypes import accumulator, named_dtype
from kvstore.errors import (
    KeyNotInitializedError,
    KVStoreError,
    OperationTimeoutError,
    PeerLeftError,
    PeerLostError,
    ProtocolError,
    from_wire,
)
from kvstore.machine import Action, Send
from kvstore.messages import (
    Ack,
    Assign,
    AssignEntry,
    ChunkEntry,
    Declare,
    Declared,
    DeclareEntry,
    Frame,
    Gone,
    Key,
    KeyStatus,
    Message,
    Pull,
    Push,
    PushEntry,
    ReadState,
    Refuse,
    Role,
    SetCompression,
    SetLearningRate,
    SetOptimizer,
    WriteState,
)
from kvstore.partition import chunk_range
from kvstore.server.assignment import check_assignment, new_key
from kvstore.server.chunk_state import read_state, write_state
from kvstore.server.optimizer_turns import OptimizerTurns
from kvstore.server.stored import JOINT, StoredChunk, StoredKey
from kvstore.server.updates import MAX_ROUNDS_AHEAD, Updates
from kvstore.server.waiting import Outbox, Waiter, Waiting

NEAR = 8
"""Rounds beyond the last complete one whose pushes are acknowledged on receipt."""
JOB = "job"
"""Subject of waits that any push or assignment may end."""


class Shard:
    """Keys of one server. `receive` and `tick` return what to send; KVStoreErrors are answers to the sender."""

    def __init__(self, config: Config, num_workers: int) -> None:
        self._chunk_elements = config.chunk_elements
        self._num_servers = max(1, config.num_servers)
        self._keys: dict[Key, StoredKey] = {}
        self._updates = Updates(num_workers)
        self.staleness = self._updates.staleness
        self._turns = OptimizerTurns(self._updates)
        self._waiting = Waiting()
        self._out = Outbox(config.message_bytes)
        self._gone: dict[int, Gone] = {}
        self._changed = False
        self.compression: str | None = None

    @property
    def optimizer(self) -> str | None:
        """The installed optimizer's specification as JSON."""
        return self._turns.current

    def receive(self, sender: str, message: Message, frames: Sequence[Frame], now: float) -> list[Action]:
        """Handle a worker's request."""
        match message:
            case Push():
                self._push(sender, message, frames)
            case Pull(entries=entries):
                for entry in entries:
                    self._pull(sender, message, entry, now)
            case Assign():
                self._assign(sender, message, frames, now)
            case Declare():
                self._declare(sender, message, now)
            case Refuse():
                self._refuse(sender, message)
            case SetOptimizer():
                self._set_optimizer(sender, message, now)
            case SetLearningRate(sequence=sequence):
                self._turns.set_learning_rate(message.learning_rate, message.multipliers)
                self._out.add(Send(sender, Ack(sequences=[sequence])))
            case SetCompression(sequence=sequence, params=params):
                policy_from_json(params)  # refused here, not at the first push
                self.compression = params
                self._out.add(Send(sender, Ack(sequences=[sequence])))
            case ReadState():
                stored, chunk = self._find(message.key, message.chunk)
                self._out.add(read_state(sender, message, chunk, self._turns.current))
            case WriteState():
                stored, chunk = self._find(message.key, message.chunk)
                write_state(message, frames, stored, chunk, self._updates.optimizer)
                self._out.add(Send(sender, Ack(sequences=[message.sequence])))
            case _:
                raise ProtocolError(f"{type(message).__name__} is nothing a server answers")
        while self._changed:
            self._changed = False
            self._waiting.retry(JOB)
        return self._out.take()

    def tick(self, now: float) -> list[Action]:
        """End waits whose deadline has passed."""
        for waiter, error in self._waiting.expire(now):
            self._out.failed(waiter.sender, waiter.sequence, error, [waiter.entry] if waiter.entry else None)
        return self._out.take()

    def peer_gone(self, gone: Gone) -> list[Action]:
        """A process is out; waits that need it end."""
        if gone.role == Role.WORKER and gone.rank not in self._gone:
            self._gone[gone.rank] = gone
            self._waiting.retry_all()
        return self._out.take()

    def keys(self) -> list[KeyStatus]:
        """What is stored, for `status`."""
        return [
            KeyStatus(
                key, len(stored.chunks), sum(chunk.value.size for chunk in stored.chunks.values()),
                min((_progress(chunk) for chunk in stored.chunks.values()), default=0),
                stored.raw_bytes, stored.received_bytes,
            )
            for key, stored in self._keys.items()
        ]  # fmt: skip

    def validate(self) -> None:
        """Check the invariants; raises AssertionError. For tests."""
        for stored in self._keys.values():
            stored.validate(self._updates.num_workers)

    # --- pushes and pulls -----------------------------------------------------------------------------------------

    def _push(self, sender: str, message: Push, frames: Sequence[Frame]) -> None:
        if len(frames) != len(message.entries):
            raise ProtocolError(f"push of {len(message.entries)} chunks came with {len(frames)} frames")
        for entry, frame in zip(message.entries, frames, strict=True):
            failed = ChunkEntry(entry.key, entry.chunk, entry.round, 0)
            try:
                stored, chunk = self._find(entry.key, entry.chunk)
            except KVStoreError as error:
                self._out.failed(sender, message.sequence, error, [failed])
                continue
            try:
                self._updates.push(stored, chunk, message.rank, entry, frame)
            except KVStoreError as error:
                self._out.failed(sender, message.sequence, error, [failed])
                for part in stored.chunks.values() if entry.whole else (chunk,):
                    self._updates.refuse(stored, part, message.rank, entry.round, error)
            self._changed = True
            for index in stored.chunks if stored.whole or entry.whole else (entry.chunk,):
                self._waiting.retry((entry.key, index))
        self._acknowledge(sender, message.sequence, message.entries)

    def _acknowledge(self, sender: str, sequence: int, entries: Sequence[PushEntry]) -> bool:
        """Acknowledge a push, but not before the rounds that it is for are near.

        Credits then hold back a worker that is far ahead of the slowest one; without an answer it asks again.
        """
        far = next((entry for entry in entries if self._ahead(entry) > NEAR), None)
        if far is None:
            self._out.add(Send(sender, Ack(sequences=[sequence])))
        elif self._ahead(far) <= MAX_ROUNDS_AHEAD:

            def attempt() -> bool:
                return self._acknowledge(sender, sequence, entries)

            place = ChunkEntry(far.key, far.chunk, far.round, 0)
            waiter = Waiter(sender, sequence, math.inf, attempt, lambda: KVStoreError("never"), place)
            self._waiting.add((far.key, far.chunk), waiter)
        return True

    def _ahead(self, entry: PushEntry) -> int:
        stored = self._keys.get(entry.key)
        chunk = stored.chunks.get(entry.chunk) if stored and stored.sync else None
        return entry.round - chunk.round if chunk else 0

    def _pull(self, sender: str, message: Pull, entry: ChunkEntry, now: float) -> None:
        rank = message.rank

        def answer() -> bool:
            return self._answer_pull(sender, message.sequence, rank, entry)

        def explain() -> KVStoreError:
            return self._pull_timeout(entry, rank, message.timeout)

        if not answer():
            waiter = Waiter(sender, message.sequence, now + message.timeout, answer, explain, entry)
            self._waiting.add((entry.key, entry.chunk), waiter)

    def _answer_pull(self, sender: str, sequence: int, rank: int, entry: ChunkEntry) -> bool:
        stored = self._keys.get(entry.key)
        chunk = stored.chunks.get(entry.chunk) if stored else None
        if stored is None or chunk is None or chunk.epoch < entry.epoch:
            return self._fail_without(0, sender, sequence, f"gave key {entry.key!r} its value", entry)
        done, whose = (chunk.round, JOINT) if stored.sync else (chunk.pushed.get(rank, 0), rank)
        if done >= entry.round:
            error = chunk.failures.get((entry.round, whose))
            if error is None and self._updates.behind(stored, chunk, rank, self._gone):
                return False
            if error is None:
                chunk.seen[rank] = chunk.step
                self._out.value(sender, entry, chunk.frame())
        else:
            error = self._updates.obstacle(stored, chunk, self._gone, rank)
            if error is None:
                return False
        if error is not None:
            self._out.failed(sender, sequence, error, [entry])
        return True

    def _pull_timeout(self, entry: ChunkEntry, rank: int, timeout: float) -> KVStoreError:
        stored = self._keys.get(entry.key)
        chunk = stored.chunks.get(entry.chunk) if stored else None
        if stored is None or chunk is None or chunk.epoch < entry.epoch:
            lacking = "rank 0 has not given it a value"
        else:
            lacking = self._updates.lacking(stored, chunk, rank, entry.round, self._gone)
        return OperationTimeoutError(
            f"pull of key {entry.key!r} waited {timeout:.1f} s on the server: {lacking}", key=entry.key
        )

    def _refuse(self, sender: str, message: Refuse) -> None:
        failure = message.failure
        error = from_wire(failure.error, failure.text, failure.facts)
        for key, number in message.rounds:
            stored = self._keys.get(key)
            if stored is None:
                continue
            for chunk in stored.chunks.values():
                self._updates.refuse(stored, chunk, message.rank, number, error)
                self._waiting.retry((key, chunk.index))
        self._out.add(Send(sender, Ack(sequences=[message.sequence])))

    # --- keys -----------------------------------------------------------------------------------------------------

    def _assign(self, sender: str, message: Assign, frames: Sequence[Frame], now: float) -> None:
        if message.rank != 0:
            raise ProtocolError(f"assignment by rank {message.rank}: values come from rank 0", rank=message.rank)
        if len(frames) != len(message.entries):
            raise ProtocolError(f"assignment of {len(message.entries)} chunks came with {len(frames)} frames")
        for entry, frame in zip(message.entries, frames, strict=True):
            check_assignment(entry, frame, self._keys.get(entry.key), self._chunk_elements, self._updates.needs_whole)
        left = list(zip(message.entries, frames, strict=True))

        def attempt() -> bool:
            left[:] = [
                (entry, frame) for entry, frame in left if not self._assign_chunk(entry, frame, message.sequence)
            ]
            if not left:
                self._out.add(Send(sender, Ack(sequences=[message.sequence])))
            return not left

        def explain() -> KVStoreError:
            key = left[0][0].key
            return OperationTimeoutError(f"broadcast of key {key!r}: earlier rounds did not complete", key=key)

        self._wait_for(sender, message.sequence, now + message.timeout, attempt, explain)

    def _assign_chunk(self, entry: AssignEntry, frame: Frame, sequence: int) -> bool:
        stored = self._keys.get(entry.key)
        chunk = stored.chunks.get(entry.chunk) if stored else None
        if chunk is not None and (chunk.epoch, chunk.assigned) >= (entry.epoch, sequence):
            return True  # a repeat; a later message of the same epoch is another attempt, after the first one failed
        # A chunk of a still older epoch is left over: in between the key had a shape with no such chunk here.
        if stored and chunk and stored.sync and chunk.epoch == entry.epoch - 1 and chunk.round < entry.round:
            if (obstacle := self._updates.obstacle(stored, chunk, self._gone)) is not None:
                raise obstacle
            return False
        dtype = named_dtype(entry.dtype, entry.key)
        reshaped = stored is None or (stored.shape, stored.dtype) != (entry.shape, dtype)
        if stored is None or reshaped:
            stored = self._keys[entry.key] = new_key(entry, self._chunk_elements, self._num_servers)
        value = np.frombuffer(frame, np.uint8).copy().view(dtype)
        master = value.astype(accumulator(dtype), copy=False)
        start, _ = chunk_range(entry.chunk, stored.elements, self._chunk_elements)
        fresh = StoredChunk(entry.key, entry.chunk, start, master, value, entry.epoch, entry.round, assigned=sequence)
        if chunk is not None:
            fresh.pushed = chunk.pushed
        if chunk is not None and chunk.value.size == value.size:
            fresh.open, fresh.early = chunk.open, chunk.early
            if reshaped:  # pushes of the whole key of another size are not of this one
                fresh.open = {number: one for number, one in fresh.open.items() if one.aggregate.whole is None}
                fresh.early = {place: one for place, one in fresh.early.items() if one.whole is None}
        stored.chunks[entry.chunk] = fresh
        stored.state = None
        self._updates.skip(stored, fresh, 0, entry.round)
        self._waiting.retry((entry.key, entry.chunk))
        self._changed = True
        return True

    def _declare(self, sender: str, message: Declare, now: float) -> None:
        def attempt() -> bool:
            for entry in message.entries:
                if not self._has_value(entry):
                    return self._fail_without(0, sender, message.sequence, f"gave key {entry.key!r} its value")
                stored = self._keys[entry.key]
                if (error := stored.difference(entry, message.rank)) is not None:
                    self._out.failed(sender, message.sequence, error)
                    return True
            for entry in message.entries:
                stored = self._keys[entry.key]
                for chunk in stored.chunks.values():
                    self._updates.skip(stored, chunk, message.rank, entry.round)
                    self._waiting.retry((entry.key, chunk.index))
            whole = [self._keys[entry.key].whole for entry in message.entries]
            self._out.add(Send(sender, Declared(sequence=message.sequence, whole=whole)))
            return True

        def explain() -> KVStoreError:
            absent = [entry.key for entry in message.entries if not self._has_value(entry)]
            return OperationTimeoutError(
                f"rank 0 has not called init or broadcast for {len(absent)} keys, first {absent[0]!r}", key=absent[0]
            )

        self._wait_for(sender, message.sequence, now + message.timeout, attempt, explain)

    def _has_value(self, entry: DeclareEntry) -> bool:
        stored = self._keys.get(entry.key)
        return stored is not None and stored.complete and stored.epoch >= entry.epoch

    def _set_optimizer(self, sender: str, message: SetOptimizer, now: float) -> None:
        def attempt() -> bool:
            if not self._turns.offer(message.rank, message.turn, message.spec, self._keys):
                return self._fail_without(0, sender, message.sequence, "called set_optimizer")
            self._out.add(Send(sender, Ack(sequences=[message.sequence])))
            return True

        def explain() -> KVStoreError:
            return OperationTimeoutError(f"rank 0 has not called set_optimizer for the {message.turn}. time")

        self._wait_for(sender, message.sequence, now + message.timeout, attempt, explain)
        self._changed = True

    # --- shared ---------------------------------------------------------------------------------------------------

    def _find(self, key: Key, index: int) -> tuple[StoredKey, StoredChunk]:
        stored = self._keys.get(key)
        if stored is None or index not in stored.chunks:
            text = f"chunk {index} of key {key!r} is not on this server: call init first"
            raise KeyNotInitializedError(text, key=key)
        return stored, stored.chunks[index]

    def _wait_for(
        self,
        sender: str,
        sequence: int,
        deadline: float,
        attempt: Callable[[], bool],
        explain: Callable[[], KVStoreError],
    ) -> None:
        def guarded() -> bool:
            try:
                return attempt()
            except KVStoreError as error:
                self._out.failed(sender, sequence, error)
                return True

        if not guarded():
            self._waiting.add(JOB, Waiter(sender, sequence, deadline, guarded, explain))

    def _fail_without(self, rank: int, sender: str, sequence: int, deed: str, entry: ChunkEntry | None = None) -> bool:
        """True, and the request refused, if the worker that it waits for is out."""
        gone = self._gone.get(rank)
        if gone is None:
            return False
        error: KVStoreError
        if gone.lost:
            text = f"worker {rank} was lost before it {deed}"
            error = PeerLostError(text, role=Role.WORKER.value, rank=rank, age=gone.age)
        else:
            error = PeerLeftError(f"worker {rank} left before it {deed}", role=Role.WORKER.value, rank=rank)
        self._out.failed(sender, sequence, error, [entry] if entry else None)
        return True


def _progress(chunk: StoredChunk) -> int:
    return max(chunk.round, min(chunk.pushed.values(), default=0))
