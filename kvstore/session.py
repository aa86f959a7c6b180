"""A worker's requests to servers and scheduler: pure bookkeeping of what is queued, on the way and answered.

An `Operation` is what a user waits for: a number of parts, a deadline, an error. Parts are
    Push     an encoded chunk; done when the server has acknowledged it
    Pull     a chunk at a version; done when its value has been copied into `target`
    Request  any other message; done when it is answered

Order: one pair of processes keeps the order of its messages. On top of that a push of a chunk waits until every pull
of that chunk at an earlier round is answered, so that a pull sees exactly the rounds that preceded it. Pushes never
wait for pulls of other chunks, so workers that use different orders of keys cannot block each other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.config import Config
from kvstore.errors import KVStoreError, OperationTimeoutError, ProtocolError, from_wire
from kvstore.lane import Lane, PullPart, PushPart, Sent
from kvstore.machine import SCHEDULER, Action, Send, server_address
from kvstore.messages import (
    Ack,
    ChunkEntry,
    Declared,
    Failed,
    Frame,
    Key,
    Message,
    PushEntry,
    State,
    Status,
    Values,
)
from kvstore.wire import frame_bytes

Answer = Ack | Declared | State | Status


@dataclass(eq=False)
class Operation:
    """Something a user waits for. `what`: for error texts ("pull of 'w'"). Times in seconds, monotonic."""

    what: str
    deadline: float
    parts: int
    error: KVStoreError | None = None
    done: bool = False
    started: float = 0.0
    on_done: Callable[[Operation], None] | None = None
    on_acknowledged: Callable[[int], None] | None = None
    """Called with the size in bytes of each pushed chunk that the server has, or that is given up."""

    def fail(self, error: KVStoreError) -> None:
        """Keep the first error and end."""
        if not self.done:
            self.error = error
            self._end()

    def part_done(self) -> None:
        """One part less to wait for."""
        self.parts -= 1
        if self.parts <= 0 and not self.done:
            self._end()

    def _end(self) -> None:
        self.done = True
        if self.on_done is not None:
            self.on_done(self)


@dataclass(frozen=True)
class Push:
    """A part: one encoded chunk for one server. `frame` must not change until the operation is done."""

    server: int
    entry: PushEntry
    frame: Frame
    priority: int = 0


@dataclass(frozen=True)
class Pull:
    """A part: one chunk from one server into `target`, a flat uint8 view of where it goes."""

    server: int
    entry: ChunkEntry
    target: npt.NDArray[np.uint8]
    priority: int = 0


@dataclass(frozen=True)
class Request:
    """A part: a message built from its sequence number and seconds left; `answered` receives the answer."""

    to: str
    build: Callable[[int, float], Message]
    frames: Sequence[Frame] = ()
    answered: Callable[[Answer, Sequence[Frame]], None] | None = None


Part = Push | Pull | Request


@dataclass
class _ChunkOrder:
    """Of one chunk: how many pulls at which round are unanswered, and the pushes of later rounds, in order."""

    pulls: dict[int, int] = field(default_factory=dict)
    blocked: deque[PushPart] = field(default_factory=deque)

    def holds(self, push: PushPart) -> bool:
        return any(number < push.entry.round for number in self.pulls)


class Session:
    """See the module's docstring. `submit`, `receive` and `tick` return what to send."""

    def __init__(self, config: Config, rank: int, num_servers: int) -> None:
        self._config = config
        self._rank = rank
        self._sequence = 0
        self._lanes = [Lane(config, server_address(server), rank) for server in range(num_servers)]
        self._requests: dict[int, tuple[Operation, Request, Sent]] = {}
        self._operations: set[Operation] = set()
        self._order: defaultdict[tuple[Key, int], _ChunkOrder] = defaultdict(_ChunkOrder)
        self._lost: dict[str, KVStoreError] = {}
        self._complaints: dict[str, str] = {}
        self.broken: KVStoreError | None = None

    def submit(self, operation: Operation, parts: Iterable[Part], now: float) -> list[Action]:
        """Queue parts of an operation (which may be submitted in several batches) and send what credits allow."""
        if self.broken is not None:
            operation.fail(self.broken)
        actions: list[Action] = []
        touched: set[int] = set()
        for part in parts:
            if (lost := self._lost.get(_address(part))) is not None:
                operation.fail(lost)
            if operation.done:
                abandon(operation, [part])
                continue
            self._operations.add(operation)
            match part:
                case Push(server=server):
                    self._queue_push(operation, part)
                    touched.add(server)
                case Pull(server=server):
                    pulls = self._order[part.entry.key, part.entry.chunk].pulls
                    pulls[part.entry.round] = pulls.get(part.entry.round, 0) + 1
                    self._lanes[server].queue_pull(PullPart(operation, part.entry, part.target, part.priority))
                    touched.add(server)
                case Request():
                    actions += self._send_request(operation, part, now)
        if operation.done:
            self._forget_done()
        for server in touched:
            actions += self._pump(server, now)
        return actions

    def receive(self, sender: str, message: Message, frames: Sequence[Frame], now: float) -> list[Action]:
        """Handle an answer; answers to nothing (late or repeated) are dropped."""
        match message:
            case Values(entries=entries):
                return self._values(self._lane_of(sender), entries, frames, now)
            case Ack(sequences=sequences):
                return [action for sequence in sequences for action in self._answer(sender, sequence, message, (), now)]
            case Declared(sequence=sequence) | State(sequence=sequence) | Status(sequence=sequence):
                return self._answer(sender, sequence, message, frames, now)
            case Failed(sequence=None, failure=failure):
                self._complaints[sender] = failure.text
                return []
            case Failed():
                return self._failed(sender, message, now)
            case _:
                raise ProtocolError(f"{type(message).__name__} from {sender} is nothing a worker expects")

    def tick(self, now: float) -> list[Action]:
        """Expire operations and send again what stayed unanswered."""
        for operation in [late for late in self._operations if late.deadline <= now]:
            operation.fail(self._timed_out(operation, now))
        if any(operation.done for operation in self._operations):
            self._forget_done()
        actions: list[Action] = []
        for server, lane in enumerate(self._lanes):
            lane.stretch()
            actions += [*self._pump(server, now), *lane.resend(now)]
        for sequence, (operation, request, sent) in self._requests.items():
            if sent.due(now, self._config.retry):
                message = request.build(sequence, max(operation.deadline - now, 0.0))
                actions.append(Send(request.to, message, request.frames))
        return actions

    def fail_all(self, error: KVStoreError) -> None:
        """The job is over for this worker: every operation, present and future, ends with `error`."""
        self.broken = error
        for operation in list(self._operations):
            operation.fail(error)
        self._forget_done()

    def fail_server(self, server: int, error: KVStoreError) -> None:
        """A server is lost: end whatever waits for it."""
        address = server_address(server)
        self._lost[address] = error
        waiting = {operation for operation, to in self._unanswered() if to == address}
        for operation in waiting:
            operation.fail(error)
        self._forget_done()

    def idle(self) -> bool:
        """True if nothing is outstanding."""
        return not self._operations

    def validate(self) -> None:
        """Check the invariants; used by tests after every step."""
        for lane in self._lanes:
            lane.validate()
        assert all(not operation.done for operation in self._operations)
        for order in self._order.values():
            assert order.pulls and all(count > 0 for count in order.pulls.values()), "nothing holds these pushes"
            assert not order.blocked or order.holds(order.blocked[0]), "a push waits for nothing"
        pulls = sum(sum(order.pulls.values()) for order in self._order.values())
        assert pulls == sum(lane.num_pulls for lane in self._lanes)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _queue_push(self, operation: Operation, part: Push) -> None:
        queued = PushPart(operation, part.entry, part.frame, part.priority, part.server)
        order = self._order.get((part.entry.key, part.entry.chunk))
        if order is not None and (order.blocked or order.holds(queued)):
            order.blocked.append(queued)
        else:
            self._lanes[part.server].queue_push(queued)

    def _send_request(self, operation: Operation, request: Request, now: float) -> list[Action]:
        sequence = self.next_sequence()
        self._requests[sequence] = (operation, request, Sent(now))
        return [Send(request.to, request.build(sequence, max(operation.deadline - now, 0.0)), request.frames)]

    def _pump(self, server: int, now: float) -> list[Action]:
        return self._lanes[server].pump(self.next_sequence, now)

    def next_sequence(self) -> int:
        """A number for a request of this worker."""
        self._sequence += 1
        return self._sequence

    def _lane_of(self, sender: str) -> int:
        for server, lane in enumerate(self._lanes):
            if lane.address == sender:
                return server
        raise ProtocolError(f"values from {sender}, which is no server of this job")

    # --- answers --------------------------------------------------------------------------------------------------

    def _values(self, server: int, entries: Sequence[ChunkEntry], frames: Sequence[Frame], now: float) -> list[Action]:
        if len(entries) != len(frames):
            raise ProtocolError(f"{len(entries)} values but {len(frames)} frames from server {server}")
        finished: list[Operation] = []
        for entry, frame in zip(entries, frames, strict=True):
            for part in self._lanes[server].take_pulls(entry):
                self._fill(part, frame)
                finished.append(part.operation)
                self._pull_ended(entry)
        actions = self._pump(server, now)
        self._complete(finished)
        return actions

    def _fill(self, part: PullPart, frame: Frame) -> None:
        data = np.frombuffer(frame, np.uint8)
        if data.size != part.target.size:
            part.operation.fail(
                ProtocolError(
                    f"chunk {part.entry.chunk} of key {part.entry.key!r} came with {data.size} bytes, "
                    f"expected are {part.target.size}",
                    key=part.entry.key,
                )
            )
        else:
            part.target[:] = data

    def _pull_ended(self, entry: ChunkEntry) -> None:
        order = self._order[entry.key, entry.chunk]
        order.pulls[entry.round] -= 1
        if not order.pulls[entry.round]:
            del order.pulls[entry.round]
        while order.blocked and not order.holds(order.blocked[0]):
            push = order.blocked.popleft()
            self._lanes[push.server].queue_push(push)
        if not order.pulls:
            del self._order[entry.key, entry.chunk]

    def _answer(self, sender: str, sequence: int, answer: Answer, frames: Sequence[Frame], now: float) -> list[Action]:
        if sequence in self._requests:
            operation, request, _ = self._requests.pop(sequence)
            if request.answered is not None and not operation.done:
                request.answered(answer, frames)
            self._complete([operation])
            return []
        if sender == SCHEDULER:
            return []
        server = self._lane_of(sender)
        parts = self._lanes[server].acknowledge(sequence)
        for part in parts:
            _release(part)
        finished = [part.operation for part in parts]
        actions = self._pump(server, now)
        self._complete(finished)
        return actions

    def _failed(self, sender: str, message: Failed, now: float) -> list[Action]:
        sequence, failure = message.sequence, message.failure
        assert sequence is not None
        error = from_wire(failure.error, failure.text, failure.facts)
        if sequence in self._requests:
            operations = {self._requests.pop(sequence)[0]}
        elif sender == SCHEDULER:
            operations = set()
        else:
            operations = self._lanes[self._lane_of(sender)].failed(sequence, message.entries)
        for operation in operations:
            operation.fail(error)
        self._forget_done()
        return [action for server in range(len(self._lanes)) for action in self._pump(server, now)]

    def _complete(self, operations: Iterable[Operation]) -> None:
        failed = False
        for operation in operations:
            operation.part_done()
            failed |= operation.error is not None
            if operation.done:
                self._operations.discard(operation)
        if failed:
            self._forget_done()

    def _forget_done(self) -> None:
        """Drop the parts of operations that ended with an error; pushes behind their pulls may go now."""
        for sequence in [number for number, (operation, _, _) in self._requests.items() if operation.done]:
            del self._requests[sequence]
        for order in self._order.values():
            for push in order.blocked:
                if push.operation.done:
                    _release(push)
            order.blocked = deque(push for push in order.blocked if not push.operation.done)
        for lane in self._lanes:
            pushes, pulls = lane.drop_done()
            for push in pushes:
                _release(push)
            for pull in pulls:
                self._pull_ended(pull.entry)
        self._operations = {operation for operation in self._operations if not operation.done}

    def _unanswered(self) -> Iterator[tuple[Operation, str]]:
        """Every operation with the address of each part that it waits for."""
        for lane in self._lanes:
            yield from ((operation, lane.address) for operation in lane.operations())
        for order in self._order.values():
            yield from ((push.operation, server_address(push.server)) for push in order.blocked)
        yield from ((operation, request.to) for operation, request, _ in self._requests.values())

    def _timed_out(self, operation: Operation, now: float) -> OperationTimeoutError:
        silent = [to for other, to in self._unanswered() if other is operation]
        waited = now - operation.started
        names = ", ".join(sorted(set(silent)))
        said = "".join(f"; {who} refused a message: {text}" for who, text in self._complaints.items() if who in silent)
        return OperationTimeoutError(
            f"{operation.what} did not finish within {waited:.1f} s: no answer yet from {names}{said}"
            f" (KVSTORE_TIMEOUT sets the limit; `kvstore-server status` shows who is in)",
            rank=self._rank,
        )


def abandon(operation: Operation, parts: Iterable[Part]) -> None:
    """These parts of an ended operation will never be sent."""
    if operation.on_acknowledged is not None:
        for part in parts:
            if isinstance(part, Push):
                operation.on_acknowledged(frame_bytes(part.frame))


def _release(part: PushPart) -> None:
    if part.operation.on_acknowledged is not None:
        part.operation.on_acknowledged(part.size)


def _address(part: Part) -> str:
    return part.to if isinstance(part, Request) else server_address(part.server)
