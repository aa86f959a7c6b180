"""A launcher process that is interrupted, stopped or killed: exit codes, and nothing left running."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, TypeAlias

import psutil
import pytest

from kvstore.server.launch_plan import Plan

Planner: TypeAlias = Callable[..., Plan]
Living: TypeAlias = Callable[[str], list[psutil.Process]]

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
WAITING = "import signal; print('ready', flush=True); signal.pause()"

DRIVER = """
import json, sys
from kvstore.server.launch_plan import Plan
from kvstore.server.launcher import launch
settings = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(sys.argv[1]).items()}
sys.exit(launch(Plan(**settings), drain=0.2, patience=0.3))
"""


class Launcher:
    """A launcher process whose workers have each said `ready`."""

    def __init__(self, made: Plan, **streams: Any) -> None:
        self.job, self.workers = made.job, made.workers
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(asdict(made))],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
        )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        for _ in range(self.workers):
            assert self.process.stdout.readline().endswith(b"ready\n")

    def finish(self) -> tuple[int, str]:
        """Exit code and the last line on standard error."""
        _, err = self.process.communicate(timeout=20)
        return self.process.returncode, err.decode().splitlines()[-1]


@pytest.fixture
def start(living: Living) -> Iterator[Callable[..., Launcher]]:
    started: list[Launcher] = []

    def begin(made: Plan, **streams: Any) -> Launcher:
        started.append(Launcher(made, **streams))
        return started[-1]

    yield begin
    for launcher in started:
        with launcher.process as process:
            process.kill()
        psutil.wait_procs(living(launcher.job), timeout=10)


@pytest.mark.parametrize("program", [WAITING, STUBBORN], ids=["willing", "stubborn"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_stopped_by_signal(
    start: Callable[..., Launcher], program: str, number: int, code: int, make_plan: Planner, living: Living
) -> None:
    launcher = start(make_plan(program))
    launcher.wait_ready()
    launcher.process.send_signal(number)
    assert launcher.finish() == (code, f"kvstore-server: stopped by {signal.Signals(number).name}")
    assert living(launcher.job) == []


def test_ctrl_c_reaches_the_workers_once(start: Callable[..., Launcher], make_plan: Planner) -> None:
    program = """
import signal
try:
    print("ready", flush=True)
    signal.pause()
except KeyboardInterrupt:
    print("saving", flush=True)
"""
    launcher = start(make_plan(program, grace=10.0))
    launcher.wait_ready()
    launcher.process.send_signal(signal.SIGINT)
    out, _ = launcher.process.communicate(timeout=20)
    assert launcher.process.returncode == 130
    assert sorted(out.splitlines()) == [b"worker 0 | saving", b"worker 1 | saving"]


def test_second_signal_kills_at_once(start: Callable[..., Launcher], make_plan: Planner, living: Living) -> None:
    program = (
        "import signal\ndef told(*_): print('told', flush=True)\n"
        "signal.signal(signal.SIGINT, told)\nprint('ready', flush=True)\nwhile True: signal.pause()"
    )
    launcher = start(make_plan(program, workers=1, grace=600.0))
    launcher.wait_ready()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.process.stdout is not None
    assert launcher.process.stdout.readline() == b"worker 0 | told\n"
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.finish()[0] == 130
    assert living(launcher.job) == []


def test_killed_launcher_leaves_nothing(start: Callable[..., Launcher], make_plan: Planner, living: Living) -> None:
    launcher = start(make_plan(STUBBORN))
    launcher.wait_ready()
    running = living(launcher.job)
    assert len(running) == 4
    launcher.process.kill()
    _, left = psutil.wait_procs(running, timeout=10)
    assert [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []


def test_reader_that_goes_away_stops_the_job(
    start: Callable[..., Launcher], make_plan: Planner, living: Living
) -> None:
    program = "print('ready', flush=True)\nwhile True: print('more', flush=True)"
    launcher = start(make_plan(program, workers=1))
    launcher.wait_ready()
    assert launcher.process.stdout is not None
    launcher.process.stdout.close()
    assert launcher.process.wait(20) == 128 + signal.SIGPIPE
    assert living(launcher.job) == []


def test_reader_that_does_not_read_cannot_hold_up_a_signal(
    start: Callable[..., Launcher], make_plan: Planner, living: Living
) -> None:
    program = "import os, sys\nprint('ready', flush=True)\nfor _ in range(1000): os.write(1, b'x' * 1000 + b'\\n')"
    launcher = start(make_plan(program, workers=1))
    launcher.wait_ready()
    launcher.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert launcher.process.wait(20) in (143, 141)
    assert time.monotonic() - began < 10
    assert living(launcher.job) == []


def test_no_prefix_passes_through(start: Callable[..., Launcher], make_plan: Planner) -> None:
    launcher = start(make_plan("print('plain', end='')", workers=1, prefixed=False))
    out, _ = launcher.process.communicate(timeout=20)
    assert (launcher.process.returncode, out) == (0, b"plain")
