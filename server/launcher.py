"""Runs a whole job on this machine: `kvstore-server launch`. Decisions are made in `supervision`; this is the shell.

One thread waits for everything: output of the processes, their ends, signals, time. Every process leads a session of
its own, so that a Ctrl-C reaches the launcher only, which passes it on, and so that the process's own children can be
ended with it. `guard` ends the job should the launcher itself be killed.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from kvstore.errors import KVStoreError
from kvstore.messages import Exited, Role
from kvstore.server import guard
from kvstore.server.launch_plan import Plan
from kvstore.server.output import Lines, Sink, prefix
from kvstore.server.scheduler_link import connect_scheduler
from kvstore.server.supervision import Action, Phase, Process, Report, Say, Signal, Supervision

TICK = 0.1
"""Seconds between looks at the processes; mostly their ends wake the launcher before."""

DRAIN = 8.0
"""Seconds that servers and scheduler get to end by themselves; longer than the scheduler waits for servers to leave."""

LEFTOVERS = 1.0
"""Seconds that processes which outlived their worker or server get after SIGTERM."""

_WAKEUP = -1
_STOPPING: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Link(Protocol):
    """A connection to the scheduler."""

    def tell(self, message: Exited | None = None) -> None:
        """Send `message`, and before it whatever could not be sent yet. Never blocks."""
        ...

    def close(self) -> None:
        """Close at once."""
        ...


def launch(
    plan: Plan,
    *,
    out: int = 1,
    err: int = 2,
    link: Callable[[str, str], Link] = connect_scheduler,
    drain: float = DRAIN,
    patience: float = 5.0,
) -> int:
    """Run the plan's job to its end; when this returns or raises, no process of the job is left.

    Args:
        out, err: file descriptors that take the processes' output and the launcher's own remarks.
        link: (endpoint of the scheduler, job id) to a connection.
        drain: seconds that servers and scheduler get to end by themselves, after the last worker.
        patience: seconds between SIGTERM and SIGKILL.

    Returns:
        0, or the exit code of the first process that failed (128 + n for signal n), or 128 + n if signal n stopped
        the launcher (130 for Ctrl-C), or 1 if the job could not start. A last line on `err` says which.
    """
    supervision = Supervision(grace=plan.grace, notice=plan.notice, drain=drain, patience=patience)
    with _signals() as (pending, wakeup):
        return _Launch(plan, supervision, Sink(out), Sink(err), link, pending, wakeup).run()


class _Launch:
    def __init__(
        self,
        plan: Plan,
        supervision: Supervision,
        out: Sink,
        err: Sink,
        link: Callable[[str, str], Link],
        pending: list[int],
        wakeup: int,
    ) -> None:
        self.plan, self.supervision, self.pending = plan, supervision, pending
        self.out, self.err, self.connect = out, err, link
        self.link: Link | None = None
        self.children: dict[Process, subprocess.Popen[bytes]] = {}
        self.streams: dict[int, tuple[Lines, Sink]] = {}
        self.told = b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(wakeup, selectors.EVENT_READ, lambda: os.read(wakeup, 4096))
        for sink in (out, err):
            sink.interrupted = lambda: bool(self.pending) or self.supervision.interrupted
        self.guard = _start_guard(plan.job)

    def run(self) -> int:
        try:
            self._start_scheduler()
            while self.supervision.phase is not Phase.FINISHED:
                self._wait(TICK)
                self._look()
        finally:
            self._clean_up()
        if self.supervision.verdict:
            self._say(self.supervision.verdict)
        return self.supervision.exit_code

    # --- starting -------------------------------------------------------------------------------------------------

    def _start_scheduler(self) -> None:
        reading, writing = os.pipe()
        try:
            process = Process(Role.SCHEDULER, 0)
            self._start(process, self.plan.port, ("--ready-fd", str(writing)), (writing,))
        finally:
            os.close(writing)
        self.selector.register(reading, selectors.EVENT_READ, lambda: self._hear(reading))

    def _hear(self, reading: int) -> None:
        """The scheduler tells its endpoint, one line, when it listens; then all others start."""
        data = os.read(reading, 4096)
        self.told += data
        if data and b"\n" not in self.told:
            return
        self.selector.unregister(reading)
        os.close(reading)
        if data:  # else it ended, which `_look` sees
            self._start_others(self.told.decode(errors="replace").strip())

    def _start_others(self, endpoint: str) -> None:
        port = endpoint.rpartition(":")[2]
        if not port.isdigit():
            self._act(self.supervision.failed(f"the scheduler told no port, but {endpoint!r}", time.monotonic()))
        for process in self.plan.others:
            if self.supervision.phase is Phase.STARTING:  # else it is being stopped
                self._start(process, int(port))
        if self.supervision.phase is Phase.STARTING:
            self.link = self.connect(endpoint, self.plan.job)
            self.supervision.running()

    def _start(self, process: Process, port: int, more: Iterable[str] = (), fds: tuple[int, ...] = ()) -> None:
        pipe = subprocess.PIPE if self.plan.prefixed else None
        try:
            child = subprocess.Popen(
                [*self.plan.argv(process), *more],
                env=self.plan.environment(process, port, os.environ),
                stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe,
                start_new_session=True, pass_fds=fds,
            )  # fmt: skip
        except OSError as error:
            self._act(self.supervision.failed(f"cannot start {process}: {error}", time.monotonic()))
            return
        self._tell_guard(f"{child.pid}\n")
        self.children[process] = child
        self.supervision.started(process, time.monotonic())
        for stream, sink in ((child.stdout, self.out), (child.stderr, self.err)):
            if stream is not None:
                self._follow(stream.fileno(), Lines(prefix(process.role, process.rank, colour=sink.colour)), sink)

    # --- watching -------------------------------------------------------------------------------------------------

    def _wait(self, seconds: float) -> None:
        for key, _ in self.selector.select(seconds):
            key.data()

    def _follow(self, stream: int, lines: Lines, sink: Sink) -> None:
        os.set_blocking(stream, False)
        self.streams[stream] = lines, sink
        self.selector.register(stream, selectors.EVENT_READ, lambda: self._copy(stream))

    def _copy(self, stream: int) -> None:
        lines, sink = self.streams[stream]
        try:
            data = os.read(stream, 1 << 16)
        except BlockingIOError:
            return
        sink.write(lines.feed(data, time.monotonic()) if data else lines.flush())
        if not data:
            self.selector.unregister(stream)
            del self.streams[stream]

    def _look(self) -> None:
        now = time.monotonic()
        while self.pending:
            self._act(self.supervision.signalled(self.pending.pop(0), now))
        if (self.out.broken or self.err.broken) and not self.supervision.verdict:
            self._act(self.supervision.signalled(signal.SIGPIPE, now))
        ends = [(process, _exit_code(self.children[process])) for process in self.supervision.alive]
        # Of those that ended together, one that was killed is the cause rather than one that complained about it.
        for process, code in sorted(((p, c) for p, c in ends if c is not None), key=lambda end: end[1]):
            self._act(self.supervision.exited(process, code, now))
        self._act(self.supervision.tick(now))
        if self.link is not None:
            self.link.tell()

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Report(process, code) if self.link is not None:
                    self.link.tell(Exited(role=process.role, rank=process.rank, code=code))
                case Signal(number, processes):
                    for process in processes:
                        guard.send(-self.children[process].pid, number)
                case Say(text):
                    self._say(text)

    def _say(self, text: str) -> None:
        self.err.write(f"kvstore-server: {text}\n".encode(errors="replace"))

    # --- ending ---------------------------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        """End what is left of the job, show the rest of its output, reap."""
        groups = [child.pid for child in self.children.values()]
        if self.supervision.phase is not Phase.FINISHED:  # an exception is on its way out
            guard.end(self.plan.job, groups, patience=0.0)
        elif left := guard.survivors(self.plan.job, groups):
            self._say(f"ending {len(left)} processes that the job left behind: {', '.join(map(str, sorted(left)))}")
            guard.end(self.plan.job, groups, patience=LEFTOVERS)
        deadline = time.monotonic() + 1.0
        while self.streams and time.monotonic() < deadline:
            self._wait(TICK)
        for lines, sink in self.streams.values():
            sink.write(lines.flush())
        self._reap()
        if self.link is not None:
            self.link.close()
        self.selector.close()

    def _reap(self) -> None:
        for child in self.children.values():
            child.poll()
            for stream in (child.stdout, child.stderr):
                if stream is not None:
                    stream.close()
        self._tell_guard(f"{guard.DONE}\n")
        with suppress(OSError, subprocess.TimeoutExpired), self.guard:
            self.guard.wait(5.0)

    def _tell_guard(self, line: str) -> None:
        assert self.guard.stdin is not None
        with suppress(OSError):  # somebody ended the guard: the job goes on without
            self.guard.stdin.write(line.encode())
            self.guard.stdin.flush()


def _start_guard(job: str) -> subprocess.Popen[bytes]:
    # Without the mark, and in a session of its own, the guard survives what it guards.
    environment = {name: value for name, value in os.environ.items() if name != guard.MARK}
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, job],
            env=environment, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        raise KVStoreError(f"cannot start the launcher's guard process: {error}") from error


def _exit_code(child: subprocess.Popen[bytes]) -> int | None:
    """Exit code, below 0 for a signal, None while it runs.

    The child is not reaped where the system can look without: its number, which names its process group too, cannot
    be given to another process before the launch is over.
    """
    if not hasattr(os, "waitid"):
        return child.poll()
    seen = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if seen is None:
        return None
    return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status


@contextmanager
def _signals() -> Iterator[tuple[list[int], int]]:
    """Collect stopping signals in a list and make the returned descriptor readable at each; main thread only.

    In another thread nothing is caught. SIGHUP stays ignored where it was (nohup).
    """
    pending: list[int] = []
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    before: dict[int, Any] = {}
    try:
        with suppress(ValueError):  # not the main thread
            before[_WAKEUP] = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
            for number in _STOPPING:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    before[number] = signal.signal(number, lambda caught, _: pending.append(caught))
        yield pending, reading
    finally:
        for which, handler in before.items():
            if which == _WAKEUP:
                signal.set_wakeup_fd(handler)
            else:
                signal.signal(which, handler)
        os.close(reading)
        os.close(writing)
