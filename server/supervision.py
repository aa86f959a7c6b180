"""What a launcher does when its processes end, when it is interrupted and when time passes. Pure.

    STARTING     only the scheduler runs; it has not told its address yet
    RUNNING      all run
    LEAVING      every worker ended well; servers and scheduler have `drain` seconds to end by themselves
    GRACE        one failed, or a signal came; the workers have `grace` seconds to see it, to save and to end
    TERMINATING  SIGTERM was sent; `patience` seconds until
    KILLING      SIGKILL was sent
    FINISHED     nothing runs

Every end of a process is reported to the scheduler at once (decision: a launcher need not wait for missed heartbeats);
for one that had left in good order this changes nothing.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from kvstore.messages import Role
from kvstore.server.output import name

INTERRUPTED = 128
"""Added to a signal's number, as shells do."""


class Process(NamedTuple):
    """One process of the job."""

    role: Role
    rank: int

    def __str__(self) -> str:
        return name(self.role, self.rank)


class Phase(Enum):
    """Where a launch stands; see the module's text."""

    STARTING = auto()
    RUNNING = auto()
    LEAVING = auto()
    GRACE = auto()
    TERMINATING = auto()
    KILLING = auto()
    FINISHED = auto()


@dataclass(frozen=True)
class Report:
    """Tell the scheduler that a process ended; `code` below 0 is a signal."""

    process: Process
    code: int


@dataclass(frozen=True)
class Signal:
    """Send a signal to the groups of these processes."""

    number: int
    processes: tuple[Process, ...]


@dataclass(frozen=True)
class Say:
    """A line for people, on standard error."""

    text: str


Action = Report | Signal | Say


def ended(process: Process, code: int) -> str:
    """'worker 1 exited with code 3', 'server 0 was killed by SIGKILL'."""
    if code >= 0:
        return f"{process} exited with code {code}"
    try:
        return f"{process} was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"{process} was killed by signal {-code}"


@dataclass
class Supervision:
    """The decisions of one launch. All times are seconds; `now` is monotonic.

    `notice`: how much longer the grace is after the scheduler died, of which nobody can tell the others.

    `exit_code` is that of the first process that failed (128 + number for a signal), or of the launcher's own
    failure or interruption, and `verdict` names it; both are final once `phase` is FINISHED.
    """

    grace: float = 5.0
    drain: float = 5.0
    start: float = 30.0
    patience: float = 5.0
    notice: float = 0.0
    phase: Phase = Phase.STARTING
    exit_code: int = 0
    alive: list[Process] = field(default_factory=list)
    deadline: float = float("inf")
    verdict: str = ""
    interrupted: bool = False

    def started(self, process: Process, now: float) -> None:
        """A process runs."""
        self.alive.append(process)
        if self.phase is Phase.STARTING and process.role is Role.SCHEDULER:
            self.deadline = now + self.start

    def running(self) -> None:
        """All processes run."""
        if self.phase is Phase.STARTING:
            self._enter(Phase.RUNNING, float("inf"))

    def exited(self, process: Process, code: int, now: float) -> list[Action]:
        """A process ended with `code` (below 0: by that signal)."""
        self.alive.remove(process)
        early = self.phase is Phase.STARTING
        listening = not early and any(other.role is Role.SCHEDULER for other in self.alive)
        actions: list[Action] = [Report(process, code)] if listening else []
        if self.phase in (Phase.STARTING, Phase.RUNNING, Phase.LEAVING) and (code or early):
            told = ended(process, code) + (" before the job had started" if early else "")
            grace = self.grace + self.notice * (process.role is Role.SCHEDULER)
            actions += self._fail(told, INTERRUPTED - code if code < 0 else code or 1, now, grace)
        return actions + self._settle(now)

    def signalled(self, number: int, now: float) -> list[Action]:
        """The launcher got a signal: the workers get it too. The next one ends more, and sooner."""
        if self.phase in (Phase.STARTING, Phase.RUNNING, Phase.LEAVING):
            return self._interrupt(number, now)
        if self.phase is Phase.GRACE and not self.interrupted:
            return [*self._terminate(now), *self._settle(now)]
        if self.phase in (Phase.GRACE, Phase.TERMINATING):
            return [Say("killing the job"), *self._kill(now), *self._settle(now)]
        return []

    def failed(self, text: str, now: float) -> list[Action]:
        """The launcher itself cannot go on."""
        return [] if self.verdict else [*self._fail(text, 1, now, self.grace), *self._settle(now)]

    def tick(self, now: float) -> list[Action]:
        """Time passed."""
        return self._settle(now) if self.phase is not Phase.FINISHED else []

    def _interrupt(self, number: int, now: float) -> list[Action]:
        self.interrupted = True
        self.verdict, self.exit_code = f"stopped by {signal.Signals(number).name}", INTERRUPTED + number
        self._enter(Phase.GRACE, now + self.grace)
        forward = number if number in (signal.SIGINT, signal.SIGTERM) else signal.SIGTERM
        workers = self._workers()
        return [*([Signal(forward, workers)] if workers else []), *self._settle(now)]

    def _fail(self, text: str, code: int, now: float, grace: float) -> list[Action]:
        self.verdict, self.exit_code = text, code
        self._enter(Phase.GRACE, now + grace)
        return [Say(f"{text}; the other workers get {grace:g} s to end")] if self._workers() else []

    def _settle(self, now: float) -> list[Action]:
        """Go on as far as the processes and the time allow."""
        if not self.alive:
            self._enter(Phase.FINISHED, float("inf"))
            return []
        late = now >= self.deadline
        match self.phase:
            case Phase.STARTING if late:
                return [
                    *self._fail(f"the scheduler did not start within {self.start:g} s", 1, now, 0.0),
                    *self._settle(now),
                ]
            case Phase.RUNNING if not self._workers():
                self._enter(Phase.LEAVING, now + self.drain)
            case Phase.LEAVING if late:
                left = ", ".join(map(str, self.alive))
                return [Say(f"every worker has ended, but not {left}: stopping them"), *self._terminate(now)]
            case Phase.GRACE if late or not self._workers():
                return self._terminate(now)
            case Phase.TERMINATING if late:
                return self._kill(now)
            case Phase.KILLING if late:
                left = ", ".join(map(str, self.alive))
                self._enter(Phase.FINISHED, float("inf"))
                return [Say(f"could not end {left}")]
        return []

    def _terminate(self, now: float) -> list[Action]:
        self._enter(Phase.TERMINATING, now + self.patience)
        return [Signal(signal.SIGTERM, tuple(self.alive))]

    def _kill(self, now: float) -> list[Action]:
        self._enter(Phase.KILLING, now + self.patience)
        return [Signal(signal.SIGKILL, tuple(self.alive))]

    def _enter(self, phase: Phase, deadline: float) -> None:
        self.phase, self.deadline = phase, deadline

    def _workers(self) -> tuple[Process, ...]:
        return tuple(process for process in self.alive if process.role is Role.WORKER)
