"""Decisions of a launch, as literal tables: what happened and when, and what the launcher does about it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from kvstore.messages import Role
from kvstore.server.supervision import Action, Phase, Process, Report, Say, Signal, Supervision, ended

SCHED, S0, W0, W1 = (
    Process(Role.SCHEDULER, 0),
    Process(Role.SERVER, 0),
    Process(Role.WORKER, 0),
    Process(Role.WORKER, 1),
)
TERM, KILL, INT, HUP = signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP


def running() -> Supervision:
    """A job of two workers and a server that runs since time 0."""
    supervision = Supervision(grace=5.0, drain=4.0, start=30.0, patience=3.0, notice=17.0)
    for process in (SCHED, S0, W0, W1):
        supervision.started(process, 0.0)
    supervision.running()
    return supervision


def play(supervision: Supervision, *events: tuple[Any, ...]) -> list[Action]:
    """Feed (method, *arguments, now); return what the last event caused."""
    actions: list[Action] = []
    for method, *arguments in events:
        actions = getattr(supervision, method)(*arguments)
    return actions


# name: (events, actions of the last event, phase, exit code)
TABLE: dict[str, tuple[list[tuple[Any, ...]], list[Action], Phase, int]] = {
    "one worker done": ([("exited", W0, 0, 1.0)], [Report(W0, 0)], Phase.RUNNING, 0),
    "all workers done": (
        [("exited", W0, 0, 1.0), ("exited", W1, 0, 2.0)],
        [Report(W1, 0)],
        Phase.LEAVING,
        0,
    ),
    "all ended by themselves": (
        [(("exited"), p, 0, 1.0) for p in (W0, W1, S0, SCHED)],
        [],
        Phase.FINISHED,
        0,
    ),
    "a server ends first, as all workers have left": ([("exited", S0, 0, 1.0)], [Report(S0, 0)], Phase.RUNNING, 0),
    "the scheduler ended first: nobody to tell": (
        [("exited", SCHED, 0, 1.0), ("exited", W0, 0, 1.0)],
        [],
        Phase.RUNNING,
        0,
    ),
    "servers stay after the last worker": (
        [("exited", W0, 0, 1.0), ("exited", W1, 0, 2.0), ("tick", 5.9)],
        [],
        Phase.LEAVING,
        0,
    ),
    "servers stay too long": (
        [("exited", W0, 0, 1.0), ("exited", W1, 0, 2.0), ("tick", 6.0)],
        [
            Say("every worker has ended, but not scheduler, server 0: stopping them"),
            Signal(TERM, (SCHED, S0)),
        ],
        Phase.TERMINATING,
        0,
    ),
    "a server fails at the end": (
        [("exited", W0, 0, 1.0), ("exited", W1, 0, 2.0), ("exited", S0, 1, 3.0)],
        [Report(S0, 1), Signal(TERM, (SCHED,))],
        Phase.TERMINATING,
        1,
    ),
    "a worker fails": (
        [("exited", W1, 3, 1.0)],
        [Report(W1, 3), Say("worker 1 exited with code 3; the other workers get 5 s to end")],
        Phase.GRACE,
        3,
    ),
    "a worker is killed": (
        [("exited", W1, -9, 1.0)],
        [Report(W1, -9), Say("worker 1 was killed by SIGKILL; the other workers get 5 s to end")],
        Phase.GRACE,
        137,
    ),
    "a server is killed": (
        [("exited", S0, -9, 1.0)],
        [Report(S0, -9), Say("server 0 was killed by SIGKILL; the other workers get 5 s to end")],
        Phase.GRACE,
        137,
    ),
    "the scheduler fails": (
        [("exited", SCHED, 1, 1.0)],
        [Say("scheduler exited with code 1; the other workers get 22 s to end")],
        Phase.GRACE,
        1,
    ),
    "the others need time to notice that the scheduler is gone": (
        [("exited", SCHED, 1, 1.0), ("tick", 22.9)],
        [],
        Phase.GRACE,
        1,
    ),
    "nobody noticed": (
        [("exited", SCHED, 1, 1.0), ("tick", 23.0)],
        [Signal(TERM, (S0, W0, W1))],
        Phase.TERMINATING,
        1,
    ),
    "the first failure counts": (
        [("exited", W1, 3, 1.0), ("exited", S0, 7, 1.5)],
        [Report(S0, 7)],
        Phase.GRACE,
        3,
    ),
    "the survivors end: no need to wait for the grace": (
        [("exited", W1, 3, 1.0), ("exited", W0, 0, 2.0)],
        [Report(W0, 0), Signal(TERM, (SCHED, S0))],
        Phase.TERMINATING,
        3,
    ),
    "grace lasts": ([("exited", W1, 3, 1.0), ("tick", 5.9)], [], Phase.GRACE, 3),
    "grace is over": (
        [("exited", W1, 3, 1.0), ("tick", 6.0)],
        [Signal(TERM, (SCHED, S0, W0))],
        Phase.TERMINATING,
        3,
    ),
    "SIGTERM is ignored": (
        [("exited", W1, 3, 1.0), ("tick", 6.0), ("tick", 9.0)],
        [Signal(KILL, (SCHED, S0, W0))],
        Phase.KILLING,
        3,
    ),
    "even SIGKILL does not help": (
        [("exited", W1, 3, 1.0), ("tick", 6.0), ("tick", 9.0), ("exited", S0, -9, 9.1), ("tick", 12.0)],
        [Say("could not end scheduler, worker 0")],
        Phase.FINISHED,
        3,
    ),
    "Ctrl-C goes to the workers": ([("signalled", INT, 1.0)], [Signal(INT, (W0, W1))], Phase.GRACE, 130),
    "SIGTERM goes to the workers": ([("signalled", TERM, 1.0)], [Signal(TERM, (W0, W1))], Phase.GRACE, 143),
    "the terminal closes": ([("signalled", HUP, 1.0)], [Signal(TERM, (W0, W1))], Phase.GRACE, 129),
    "the workers end after Ctrl-C": (
        [("signalled", INT, 1.0), ("exited", W0, -2, 1.1), ("exited", W1, 1, 1.2)],
        [Report(W1, 1), Signal(TERM, (SCHED, S0))],
        Phase.TERMINATING,
        130,
    ),
    "Ctrl-C twice": (
        [("signalled", INT, 1.0), ("signalled", INT, 1.5)],
        [Say("killing the job"), Signal(KILL, (SCHED, S0, W0, W1))],
        Phase.KILLING,
        130,
    ),
    "Ctrl-C during the grace of a failure": (
        [("exited", W1, 3, 1.0), ("signalled", INT, 1.5)],
        [Signal(TERM, (SCHED, S0, W0))],
        Phase.TERMINATING,
        3,
    ),
    "Ctrl-C while servers end": (
        [("exited", W0, 0, 1.0), ("exited", W1, 0, 2.0), ("signalled", INT, 2.5)],
        [Signal(TERM, (SCHED, S0))],
        Phase.TERMINATING,
        130,
    ),
    "a signal while killing changes nothing": (
        [("signalled", INT, 1.0), ("signalled", INT, 1.5), ("signalled", TERM, 1.6)],
        [],
        Phase.KILLING,
        130,
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_running_job(name: str) -> None:
    events, actions, phase, code = TABLE[name]
    supervision = running()
    assert play(supervision, *events) == actions
    assert (supervision.phase, supervision.exit_code) == (phase, code)


def starting() -> Supervision:
    supervision = Supervision(start=30.0)
    supervision.started(SCHED, 100.0)
    return supervision


@pytest.mark.parametrize(
    ("events", "phase", "code", "verdict"),
    [
        ([("tick", 129.9)], Phase.STARTING, 0, ""),
        ([("tick", 130.0)], Phase.TERMINATING, 1, "the scheduler did not start within 30 s"),
        (
            [("exited", SCHED, 2, 101.0)],
            Phase.FINISHED,
            2,
            "scheduler exited with code 2 before the job had started",
        ),
        (
            [("exited", SCHED, 0, 101.0)],
            Phase.FINISHED,
            1,
            "scheduler exited with code 0 before the job had started",
        ),
        ([("signalled", INT, 101.0)], Phase.TERMINATING, 130, "stopped by SIGINT"),
        ([("failed", "cannot start worker 1: no", 101.0)], Phase.TERMINATING, 1, "cannot start worker 1: no"),
    ],
)
def test_job_that_starts(events: list[tuple[Any, ...]], phase: Phase, code: int, verdict: str) -> None:
    supervision = starting()
    play(supervision, *events)
    assert (supervision.phase, supervision.exit_code, supervision.verdict) == (phase, code, verdict)


def test_nothing_started_at_all() -> None:
    supervision = Supervision()
    assert supervision.failed("cannot start scheduler: no", 0.0) == []
    assert (supervision.phase, supervision.exit_code) == (Phase.FINISHED, 1)


@pytest.mark.parametrize("first", [W0, W1, S0, SCHED])
@pytest.mark.parametrize("code", [0, 1, -9])
def test_every_job_finishes_whatever_ends_first(first: Process, code: int) -> None:
    """If nobody reacts to anything but SIGKILL, the job still finishes within its deadlines."""
    supervision = running()
    supervision.exited(first, code, 1.0)
    supervision.signalled(TERM, 2.0)
    now = 2.0
    while supervision.phase is not Phase.FINISHED:
        assert now < 20.0
        now += 0.5
        supervision.tick(now)


@pytest.mark.parametrize(
    ("process", "code", "text"),
    [
        (W1, 3, "worker 1 exited with code 3"),
        (S0, -11, "server 0 was killed by SIGSEGV"),
        (SCHED, -100, "scheduler was killed by signal 100"),
    ],
)
def test_ended(process: Process, code: int, text: str) -> None:
    assert ended(process, code) == text
