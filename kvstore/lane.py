"""What one worker has queued for, and on its way to, one server; credits bound the bytes on the way."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.config import Config
from kvstore.machine import Action, Send
from kvstore.messages import ChunkEntry, Frame, Key, Pull, Push, PushEntry
from kvstore.wire import frame_bytes

if TYPE_CHECKING:
    from kvstore.operation import Operation

MAX_ENTRIES = 1024
"""Chunks in one message, well within what a receiver accepts (`wire.Limits`)."""
MAX_STRETCH = 1 << 20
PULL_BATCH = 4
"""One request asks for so many messages of values: answers are cut to size by the server, requests are small."""
MAX_DOUBLINGS = 3
SERVER_SHARE = 0.9
"""Part of the remaining time that a server may wait: its answer names who is missing, ours could not."""


@dataclass(eq=False, slots=True)
class PushPart:
    """One encoded chunk and the operation that waits for its acknowledgement."""

    operation: Operation
    entry: PushEntry
    frame: Frame
    priority: int
    server: int
    stands_for: int = 1

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        return frame_bytes(self.frame)


@dataclass(eq=False, slots=True)
class PullPart:
    """One wanted chunk and where its bytes go."""

    operation: Operation
    entry: ChunkEntry
    target: npt.NDArray[np.uint8]
    priority: int

    @property
    def size(self) -> int:
        """Bytes on the wire, in the answer."""
        return self.target.size


@dataclass
class Sent:
    """When a message was last sent, and how often: the wait before the next repeat doubles, up to a limit."""

    at: float
    times: int = 1

    def due(self, now: float, retry: float) -> bool:
        """True, and counted as sent again, if it stayed unanswered for too long."""
        if now - self.at < retry * 2 ** min(self.times - 1, MAX_DOUBLINGS):
            return False
        self.at = now
        self.times += 1
        return True


P = TypeVar("P", PushPart, PullPart)


@dataclass
class _Flight(Generic[P]):
    parts: dict[P, None]
    sent: Sent


@dataclass
class _Window(Generic[P]):
    """A priority queue of parts, the messages under way, and their bytes."""

    queue: list[tuple[int, int, P]] = field(default_factory=list)
    flights: dict[int, _Flight[P]] = field(default_factory=dict)
    bytes: int = 0
    _order: int = 0

    def put(self, part: P) -> None:
        self._order += 1
        heapq.heappush(self.queue, (-part.priority, self._order, part))

    def batch(self, credit: int, message_bytes: int) -> list[P]:
        """Take the next parts that fit one message and the credit; an oversized part goes alone."""
        parts: list[P] = []
        size = 0
        while self.queue and len(parts) < MAX_ENTRIES:
            part = self.queue[0][2]
            if parts and size + part.size > message_bytes:
                break
            if self.bytes + size + part.size > credit and (parts or self.flights):
                break
            size += part.size
            parts.append(heapq.heappop(self.queue)[2])
        return parts

    def launch(self, sequence: int, parts: list[P], now: float) -> None:
        self.flights[sequence] = _Flight(dict.fromkeys(parts), Sent(now))
        self.bytes += sum(part.size for part in parts)

    def land(self, sequence: int, landed: Iterable[P]) -> None:
        """Some parts of a message are answered: give their credit back."""
        flight = self.flights[sequence]
        for part in landed:
            del flight.parts[part]
            self.bytes -= part.size
        if not flight.parts:
            del self.flights[sequence]

    def parts(self) -> Iterator[P]:
        yield from (part for _, _, part in self.queue)
        for flight in self.flights.values():
            yield from flight.parts

    def drop(self, unwanted: Callable[[P], bool]) -> list[P]:
        """Remove and return some parts."""
        dropped = [part for part in self.parts() if unwanted(part)]
        self.queue = [item for item in self.queue if not unwanted(item[2])]
        heapq.heapify(self.queue)
        for sequence, flight in list(self.flights.items()):
            self.land(sequence, [part for part in flight.parts if unwanted(part)])
        return dropped


class Lane:
    """Pushes and pulls between this worker and one server, each with credits of their own.

    Pushes are acknowledged on receipt, never held back by the state of a round, so a worker that waits for others
    cannot use up the credit that the others' progress needs.
    """

    def __init__(self, config: Config, address: str, rank: int) -> None:
        self.address = address
        self._config = config
        self._rank = rank
        self._pushes: _Window[PushPart] = _Window()
        self._pulls: _Window[PullPart] = _Window()
        self._stretched = 1
        self._awaited: defaultdict[tuple[Key, int], list[tuple[int, PullPart]]] = defaultdict(list)

    def queue_push(self, part: PushPart) -> None:
        """Send this chunk when credit allows; larger priority first."""
        self._pushes.put(part)

    def queue_pull(self, part: PullPart) -> None:
        """Ask for this chunk when credit allows; larger priority first."""
        self._pulls.put(part)

    def pump(self, next_sequence: Callable[[], int], now: float) -> list[Action]:
        """Send what the credits allow, small chunks fused into messages of up to `message_bytes`."""
        credit, message_bytes = self._config.credit_bytes, self._config.message_bytes
        actions: list[Action] = []
        while pushes := self._pushes.batch(credit, message_bytes):
            sequence = next_sequence()
            self._pushes.launch(sequence, pushes, now)
            actions.append(self._push_message(sequence, pushes))
        while pulls := self._pulls.batch(credit * self._stretched, message_bytes * PULL_BATCH):
            sequence = next_sequence()
            self._pulls.launch(sequence, pulls, now)
            for part in pulls:
                self._awaited[part.entry.key, part.entry.chunk].append((sequence, part))
            actions.append(self._pull_message(sequence, pulls, now))
        return actions

    def stretch(self) -> None:
        """Called at every tick: double the credit of pulls while some wait for credit and none was answered.

        A pull may wait on its server for pushes of other workers, which may wait for what this worker does after a
        pull that has no credit yet: with a fixed limit they could wait for each other for ever.
        """
        self._stretched = min(self._stretched * 2, MAX_STRETCH) if self._pulls.queue and self._pulls.flights else 1

    @property
    def num_pulls(self) -> int:
        """How many chunks are asked for, or to be asked for."""
        return sum(1 for _ in self._pulls.parts())

    def resend(self, now: float) -> list[Action]:
        """Repeat messages that stayed unanswered: their connection may have broken. Servers apply them once."""
        retry = self._config.retry
        actions: list[Action] = []
        for sequence, pushes in self._pushes.flights.items():
            if pushes.sent.due(now, retry):
                actions.append(self._push_message(sequence, list(pushes.parts)))
        for sequence, pulls in self._pulls.flights.items():
            if pulls.sent.due(now, retry):
                actions.append(self._pull_message(sequence, list(pulls.parts), now))
        return actions

    def acknowledge(self, sequence: int) -> list[PushPart]:
        """A push message arrived; its parts are done. Unknown numbers (repeated answers) give nothing."""
        flight = self._pushes.flights.get(sequence)
        parts = list(flight.parts) if flight else []
        if flight:
            self._pushes.land(sequence, parts)
        return parts

    def take_pulls(self, entry: ChunkEntry) -> list[PullPart]:
        """Parts that exactly this version of a chunk answers."""
        waiting = self._awaited.get((entry.key, entry.chunk), [])
        answered = [(sequence, part) for sequence, part in waiting if part.entry == entry]
        self._land_pulls(answered)
        return [part for _, part in answered]

    def failed(self, sequence: int, entries: Sequence[ChunkEntry]) -> set[Operation]:
        """Operations whose parts failed: those named in `entries`, or all of the message if none is named."""
        flights = (self._pushes.flights.get(sequence), self._pulls.flights.get(sequence))
        named = {(entry.key, entry.chunk, entry.round) for entry in entries}
        return {
            part.operation
            for flight in flights
            if flight is not None
            for part in flight.parts
            if not named or (part.entry.key, part.entry.chunk, part.entry.round) in named
        }

    def operations(self) -> Iterator[Operation]:
        """Every operation that has a part here."""
        yield from (part.operation for part in self._pushes.parts())
        yield from (part.operation for part in self._pulls.parts())

    def drop_done_pulls(self) -> list[PullPart]:
        """Forget and return the pulls of ended operations."""
        dropped = self._pulls.drop(lambda part: part.operation.done)
        for part in dropped:
            self._unawait(part)
        return dropped

    def drop_pushes(self) -> list[PushPart]:
        """Forget and return all pushes: there is nobody to take them."""
        return self._pushes.drop(lambda part: True)

    def validate(self) -> None:
        """Credits add up to what is under way; every pull under way is awaited."""
        for window in (self._pushes, self._pulls):
            assert window.bytes == sum(part.size for flight in window.flights.values() for part in flight.parts)
        under_way = sum(len(flight.parts) for flight in self._pulls.flights.values())
        assert under_way == sum(len(waiting) for waiting in self._awaited.values())

    def _land_pulls(self, answered: Sequence[tuple[int, PullPart]]) -> None:
        for sequence, part in answered:
            self._pulls.land(sequence, [part])
            self._unawait(part)
            self._stretched = 1

    def _unawait(self, part: PullPart) -> None:
        place = part.entry.key, part.entry.chunk
        if place in self._awaited:
            self._awaited[place] = [item for item in self._awaited[place] if item[1] is not part]
            if not self._awaited[place]:
                del self._awaited[place]

    def _push_message(self, sequence: int, parts: Sequence[PushPart]) -> Send:
        message = Push(sequence=sequence, rank=self._rank, entries=[part.entry for part in parts])
        return Send(self.address, message, [part.frame for part in parts])

    def _pull_message(self, sequence: int, parts: Sequence[PullPart], now: float) -> Send:
        left = max(part.operation.deadline for part in parts) - now
        entries = [part.entry for part in parts]
        timeout = max(left, 0.0) * SERVER_SHARE
        return Send(self.address, Pull(sequence=sequence, rank=self._rank, entries=entries, timeout=timeout))
