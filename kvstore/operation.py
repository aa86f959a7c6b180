"""What a user waits for: an operation, and the parts it is made of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import KVStoreError
from kvstore.machine import server_address
from kvstore.messages import Ack, ChunkEntry, Declared, Frame, Message, PushEntry, State, Status
from kvstore.wire import frame_bytes

if TYPE_CHECKING:
    from kvstore.lane import PushPart

Answer: TypeAlias = Ack | Declared | State | Status
_ENDING = threading.Lock()


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

    borrowed: dict[PushPart, None] = field(default_factory=dict)
    """Pushes that are not acknowledged and whose frames are the caller's own memory."""

    def fail(self, error: KVStoreError) -> None:
        """Keep the first error and end. For any thread.

        A deadline ends the wait, not the delivery: pushes stay queued, since their rounds are counted. The caller may
        write to its memory again once it has heard of the end, so what is still there is copied before.
        """
        for part in list(self.borrowed):
            part.frame = bytes(part.frame)
        self._end(error)

    def part_done(self) -> None:
        """One part less to wait for."""
        self.parts -= 1
        if self.parts <= 0:
            self._end(None)

    def _end(self, error: KVStoreError | None) -> None:
        with _ENDING:
            if self.done:
                return
            self.error, self.done = error, True
        if self.on_done is not None:
            self.on_done(self)


@dataclass(frozen=True)
class Push:
    """A part: one encoded chunk for one server.

    `borrowed`: `frame` is the caller's memory, which must not change until the operation is done.
    """

    server: int
    entry: PushEntry
    frame: Frame
    priority: int = 0
    borrowed: bool = False
    stands_for: int = 1
    """Chunks, from the entry's on, that it pushes at once."""


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


Part: TypeAlias = Push | Pull | Request


def abandon(operation: Operation, parts: Iterable[Part]) -> None:
    """These parts of an ended operation will never be sent."""
    if operation.on_acknowledged is not None:
        for part in parts:
            if isinstance(part, Push):
                operation.on_acknowledged(frame_bytes(part.frame))


def part_address(part: Part) -> str:
    """Whom this part concerns."""
    return part.to if isinstance(part, Request) else server_address(part.server)
