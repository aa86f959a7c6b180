"""Requests that a server cannot answer yet, and their deadlines. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvstore.errors import KVStoreError, to_wire
from kvstore.lane import MAX_ENTRIES
from kvstore.machine import Action, Send
from kvstore.messages import ChunkEntry, Failed, Failure, Frame, Values
from kvstore.wire import frame_bytes


@dataclass(frozen=True, eq=False)
class Waiter:
    """A request that waits. `retry` returns True once it is answered (or refused); `explain` says what it lacks."""

    sender: str
    sequence: int
    deadline: float
    retry: Callable[[], bool]
    explain: Callable[[], KVStoreError]
    entry: ChunkEntry | None = None


@dataclass
class Waiting:
    """Waiters by what may end their wait: a chunk, a key, or any other subject."""

    _by_subject: dict[object, dict[object, Waiter]] = field(default_factory=dict)

    def add(self, subject: object, waiter: Waiter) -> None:
        """Keep a waiter unless the same request already waits (it was sent again): then the later one replaces it."""
        others = self._by_subject.setdefault(subject, {})
        same = (waiter.sender, waiter.sequence, waiter.entry)
        others.pop(same, None)
        others[same] = waiter

    def retry(self, subject: object) -> None:
        """Something about the subject changed: let its waiters try again, in order of arrival."""
        waiters = self._by_subject.pop(subject, {})
        left = {same: waiter for same, waiter in waiters.items() if not waiter.retry()}
        if left:
            self._by_subject[subject] = left | self._by_subject.get(subject, {})

    def retry_all(self) -> None:
        """Something about the job changed."""
        for subject in list(self._by_subject):
            self.retry(subject)

    def expire(self, now: float) -> Iterator[tuple[Waiter, KVStoreError]]:
        """Remove and yield waiters whose deadline has passed, each with the reason."""
        for subject, waiters in list(self._by_subject.items()):
            for same in [same for same, waiter in waiters.items() if waiter.deadline <= now]:
                waiter = waiters.pop(same)
                yield waiter, waiter.explain()
            if not waiters:
                self._by_subject.pop(subject, None)

    def __len__(self) -> int:
        return sum(len(waiters) for waiters in self._by_subject.values())


@dataclass
class _Parcel:
    entries: list[ChunkEntry] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    size: int = 0


class Outbox:
    """Collects what one step wants sent; values to one receiver share messages of up to `message_bytes`."""

    def __init__(self, message_bytes: int) -> None:
        self._message_bytes = message_bytes
        self._actions: list[Action] = []
        self._parcels: dict[str, _Parcel] = {}

    def add(self, action: Action) -> None:
        """Send this."""
        self._actions.append(action)

    def value(self, to: str, entry: ChunkEntry, frame: Frame) -> None:
        """Send one chunk's value."""
        parcel = self._parcels.setdefault(to, _Parcel())
        full = parcel.size + frame_bytes(frame) > self._message_bytes or len(parcel.entries) == MAX_ENTRIES
        if parcel.entries and full:
            self._actions.append(Send(to, Values(entries=parcel.entries), parcel.frames))
            parcel = self._parcels[to] = _Parcel()
        parcel.entries.append(entry)
        parcel.frames.append(frame)
        parcel.size += frame_bytes(frame)

    def failed(self, to: str, sequence: int, error: KVStoreError, entries: list[ChunkEntry] | None = None) -> None:
        """Send an error."""
        failure = Failure(*to_wire(error))
        self._actions.append(Send(to, Failed(failure=failure, sequence=sequence, entries=entries or [])))

    def take(self) -> list[Action]:
        """Everything collected so far."""
        actions = self._actions
        actions += [Send(to, Values(entries=parcel.entries), parcel.frames) for to, parcel in self._parcels.items()]
        self._actions, self._parcels = [], {}
        return actions
