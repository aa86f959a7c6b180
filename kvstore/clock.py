"""Time as an argument: the real clock is `time.monotonic`; in simulations time moves from event to event."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Seconds, monotonic, from any origin."""


class SimulatedClock:
    """A clock and the events that wait for their time. Belongs to one thread; equal times run in the order of `at`."""

    def __init__(self, start: float = 0.0) -> None:
        self.now = start
        self._order = 0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def __call__(self) -> float:
        """Return the current simulated time in seconds."""
        return self.now

    def at(self, time: float, action: Callable[..., object], *arguments: Any) -> None:
        """Run `action(*arguments)` at `time` (seconds), at once in the next step if that has passed."""
        self._order += 1
        heapq.heappush(self._events, (time, self._order, action, arguments))

    def after(self, seconds: float, action: Callable[..., object], *arguments: Any) -> None:
        """Run `action(*arguments)` in so many seconds."""
        self.at(self.now + seconds, action, *arguments)

    def step(self, until: float) -> bool:
        """Run the next event that is due by `until`; if there is none, move to `until` and return False."""
        if not self._events or self._events[0][0] > until:
            self.now = max(self.now, until)
            return False
        time, _, action, arguments = heapq.heappop(self._events)
        self.now = max(self.now, time)
        action(*arguments)
        return True

    def advance(self, seconds: float) -> None:
        """Let so much time pass, running every event that falls due."""
        until = self.now + seconds
        while self.step(until):
            pass
