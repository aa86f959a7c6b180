"""Signals that end a server or scheduler process in good order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvstore.transport import Transport

STOPPED = 128
"""Added to the number of the signal that ended a process before the job was over, as shells do."""


class Stop:
    """Which signal came. No `threading.Event`: its lock would stop a handler that interrupts another one's `set`."""

    signal = 0

    def is_set(self) -> bool:
        """Has a signal come?"""
        return self.signal != 0


@contextmanager
def signals(transport: Transport) -> Iterator[Stop]:
    """Let SIGTERM and SIGINT end a loop. Belongs to the main thread."""
    stop = Stop()

    def end(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        transport.wake()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
