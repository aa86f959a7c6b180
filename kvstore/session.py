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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

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
    State,
    Status,
    Values,
)
from kvstore.operation import Answer, Operation, Part, Pull, Push, Request, abandon, part_address


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
        self._stale = False
        self.broken: KVStoreError | None = None

    def submit(self, operation: Operation, parts: Iterable[Part], now: float) -> list[Action]:
        """Queue parts of an operation (which may be submitted in several batches) and send what credits allow."""
        actions: list[Action] = []
        touched: set[int] = set()
        for part in parts:
            lost = self.broken or self._lost.get(part_address(part))
            if lost is not None:
                operation.fail(lost)
                abandon(operation, [part])
                continue
            if not operation.done:
                self._operations.add(operation)
            match part:
                case Push(server=server):
                    self._queue_push(operation, part)
                    touched.add(server)
                case Pull(server=server) if not operation.done:
                    pulls = self._order[part.entry.key, part.entry.chunk].pulls
                    pulls[part.entry.round] = pulls.get(part.entry.round, 0) + 1
                    self._lanes[server].queue_pull(PullPart(operation, part.entry, part.target, part.priority))
                    touched.add(server)
                case Request() if not operation.done:
                    actions += self._send_request(operation, part, now)
        self._stale |= operation.done
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
        """Expire operations, forget what ended, and send again what stayed unanswered."""
        late = [operation for operation in self._operations if operation.deadline <= now]
        if late:
            silent: defaultdict[Operation, set[str]] = defaultdict(set)
            for operation, to in self._unanswered():
                silent[operation].add(to)
            for operation in late:
                self._fail(operation, self._timed_out(operation, silent[operation], now))
        if self._stale or any(operation.done for operation in self._operations):
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
            self._fail(operation, error)
        self._forget_done()

    def fail_server(self, server: int, error: KVStoreError) -> None:
        """A server is lost: end whatever waits for it."""
        address = server_address(server)
        self._lost[address] = error
        for operation in {operation for operation, to in self._unanswered() if to == address}:
            self._fail(operation, error)
        self._forget_done()

    def idle(self) -> bool:
        """True if nothing is outstanding."""
        return not self._operations

    def validate(self) -> None:
        """Check the invariants; used by tests after every step."""
        for lane in self._lanes:
            lane.validate()
        assert all(not operation.done for operation in self._operations)
        if self._stale:
            return
        for order in self._order.values():
            assert order.pulls and all(count > 0 for count in order.pulls.values()), "nothing holds these pushes"
            assert not order.blocked or order.holds(order.blocked[0]), "a push waits for nothing"
        pulls = sum(sum(order.pulls.values()) for order in self._order.values())
        assert pulls == sum(lane.num_pulls for lane in self._lanes)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _queue_push(self, operation: Operation, part: Push) -> None:
        queued = PushPart(operation, part.entry, part.frame, part.priority, part.server, part.stands_for)
        if part.borrowed and operation.done:
            queued.frame = bytes(part.frame)
        elif part.borrowed:
            operation.borrowed[queued] = None
        self._place(queued, part.entry.chunk)

    def _place(self, push: PushPart, first: int) -> None:
        """Send it, or let it wait behind the pulls of the first of its chunks, from `first` on, that hold it."""
        for chunk in range(first, push.entry.chunk + push.stands_for):
            order = self._order.get((push.entry.key, chunk))
            if order is not None and (order.blocked or order.holds(push)):
                order.blocked.append(push)
                return
        self._lanes[push.server].queue_push(push)

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
        if part.operation.done:
            return  # its caller has been told, and may use the memory for something else
        if data.size == part.target.size:
            part.target[:] = data
            return
        text = f"chunk {part.entry.chunk} of key {part.entry.key!r} came with {data.size} bytes"
        self._fail(part.operation, ProtocolError(f"{text}, expected are {part.target.size}", key=part.entry.key))

    def _pull_ended(self, entry: ChunkEntry) -> None:
        order = self._order[entry.key, entry.chunk]
        released: list[PushPart] = []
        order.pulls[entry.round] -= 1
        if not order.pulls[entry.round]:
            del order.pulls[entry.round]
        while order.blocked and not order.holds(order.blocked[0]):
            released.append(order.blocked.popleft())
        if not order.pulls:
            del self._order[entry.key, entry.chunk]
        for push in released:
            self._place(push, entry.chunk + 1)

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
            self._fail(operation, error)
        return []

    def _fail(self, operation: Operation, error: KVStoreError) -> None:
        """End an operation; its pulls and requests are forgotten at the next tick, its pushes are still delivered."""
        operation.fail(error)
        self._operations.discard(operation)
        self._stale = True

    def _complete(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            operation.part_done()
            if operation.done:
                self._operations.discard(operation)

    def _forget_done(self) -> None:
        """Drop the pulls and requests of ended operations, and pushes to servers that are lost."""
        self._stale = False
        for sequence in [number for number, (operation, _, _) in self._requests.items() if operation.done]:
            del self._requests[sequence]
        for order in self._order.values():
            dropped = [push for push in order.blocked if self._undeliverable(push.server)]
            for push in dropped:
                _release(push)
            order.blocked = deque(push for push in order.blocked if push not in dropped)
        for server, lane in enumerate(self._lanes):
            for push in lane.drop_pushes() if self._undeliverable(server) else []:
                _release(push)
            for pull in lane.drop_done_pulls():
                self._pull_ended(pull.entry)
        self._operations = {operation for operation in self._operations if not operation.done}

    def _undeliverable(self, server: int) -> bool:
        return self.broken is not None or server_address(server) in self._lost

    def _unanswered(self) -> Iterator[tuple[Operation, str]]:
        """Every operation with the address of each part that it waits for."""
        for lane in self._lanes:
            yield from ((operation, lane.address) for operation in lane.operations())
        for order in self._order.values():
            yield from ((push.operation, server_address(push.server)) for push in order.blocked)
        yield from ((operation, request.to) for operation, request, _ in self._requests.values())

    def _timed_out(self, operation: Operation, silent: set[str], now: float) -> OperationTimeoutError:
        waited = now - operation.started
        said = "".join(f"; {who} refused a message: {text}" for who, text in self._complaints.items() if who in silent)
        names = ", ".join(sorted(silent))
        return OperationTimeoutError(
            f"{operation.what} did not finish within {waited:.1f} s: no answer yet from {names}{said}"
            f" (KVSTORE_TIMEOUT sets the limit; `kvstore-server status` shows who is in)",
            rank=self._rank,
        )


def _release(part: PushPart) -> None:
    part.operation.borrowed.pop(part, None)
    if part.operation.on_acknowledged is not None:
        part.operation.on_acknowledged(part.size)
