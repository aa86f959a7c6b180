"""Runs one machine over a transport: bytes to messages, messages to actions, actions to bytes; ticks in between."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from kvstore.dispatch import TEXT_LIMIT, dispatch
from kvstore.errors import KVStoreError
from kvstore.machine import Action, Adopt, Connect, Machine, Send
from kvstore.messages import Frame
from kvstore.transport import Transport
from kvstore.wire import Wire

_log = logging.getLogger(__name__)


class Stop(Protocol):
    """What `run` asks whether to end: a `threading.Event`, for example, set from a signal handler before `wake`."""

    def is_set(self) -> bool:
        """Return True once the loop has to end."""
        ...


class Loop:
    """Owns nothing: whoever made the transport closes it. Belongs to the transport's thread."""

    def __init__(
        self,
        machine: Machine,
        transport: Transport,
        wire: Wire,
        clock: Callable[[], float] = time.monotonic,
        tick_every: float = 0.1,
    ) -> None:
        """`clock` and `tick_every` in seconds: a tick several times per heartbeat."""
        self.machine = machine
        self.transport = transport
        self.wire = wire
        self._clock = clock
        self._tick_every = tick_every
        self._next_tick = clock()
        self._connected: set[str] = set()
        self._refusals = _Throttle(clock)
        self._bugs = _Throttle(clock)

    def run(self, stop: Stop | None = None) -> None:
        """Step until the machine has finished or `stop` is set; `transport.wake` makes that noticed at once."""
        while not self.machine.finished and not (stop is not None and stop.is_set()):
            self.step(self._tick_every)

    def step(self, timeout: float) -> None:
        """Wait up to `timeout` seconds, but not past the next tick, for messages; handle them; tick if it is due."""
        wait = min(timeout, self._next_tick - self._clock())
        for sender, frames in self.transport.receive(max(wait, 0.0)):
            self._handle(sender, frames)
        now = self._clock()
        if now >= self._next_tick:
            self._next_tick = now + self._tick_every
            self._tick(now)

    def perform(self, actions: Iterable[Action]) -> None:
        """Carry out actions in order, and those that follow when a peer is unreachable (asked once per peer).

        Raises:
            AddressError: a Connect names an address that does not resolve or cannot be used from here.
        """
        pending = deque(actions)
        told: set[str] = set()
        while pending:
            action = pending.popleft()
            if isinstance(action, Send):
                sent = self.transport.send(action.to, self.wire.encode(action.message, action.frames))
                if not sent and action.to not in told:
                    told.add(action.to)
                    pending.extend(self.machine.unreachable(action.to, self._clock()))
            elif isinstance(action, Connect):
                self.transport.connect(action.to, action.endpoint)
                self._connected.add(action.to)
            elif isinstance(action, Adopt):
                self.wire = replace(self.wire, job=action.job)

    def _handle(self, sender: str, frames: Sequence[Frame]) -> None:
        def report(what: str, error: Exception) -> None:
            if not what:
                self._refusals.log("refused a message from %s: %s", sender, str(error)[:TEXT_LIMIT])
            elif isinstance(error, KVStoreError):
                _log.debug("refused %s from %s: %s", what, sender, error)
            else:
                self._report_bug("handling %s from %s failed", what, sender)

        now, chosen = self._clock(), sender in self._connected
        actions = dispatch(self.machine, self.wire, sender, frames, now, chosen=chosen, report=report)
        self._perform_safely(actions)

    def _tick(self, now: float) -> None:
        try:
            actions = list(self.machine.tick(now))
        except KVStoreError:
            raise
        except Exception:
            self._report_bug("a tick failed")
        else:
            self._perform_safely(actions)

    def _perform_safely(self, actions: Sequence[Action]) -> None:
        try:
            self.perform(actions)
        except KVStoreError:
            raise
        except Exception:
            self._report_bug("carrying out actions failed")

    def _report_bug(self, text: str, *arguments: object) -> None:
        self._bugs.log(text, *arguments, level=logging.ERROR, traceback=True)


class _Throttle:
    """At most one line per second; the next one says how many were left out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next = float("-inf")
        self._left_out = 0

    def log(self, text: str, *arguments: object, level: int = logging.WARNING, traceback: bool = False) -> None:
        now = self._clock()
        if now < self._next:
            self._left_out += 1
            return
        more = f" (and {self._left_out} more since the last such line)" if self._left_out else ""
        self._next, self._left_out = now + 1.0, 0
        _log.log(level, text + more, *arguments, exc_info=traceback)
