"""What a launch leaves behind is found and ended, also when the launcher is gone."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvstore.server import guard

# Ignores SIGTERM; says when it is ready.
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True: signal.pause()
"""

# Starts STUBBORN in a session of its own, where no process group finds it, and ends.
ESCAPING = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=True)
"""

linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


@pytest.fixture
def job() -> Iterator[str]:
    """A job id; whatever still carries it after the test is killed."""
    name = secrets.token_hex(8)
    yield name
    guard.end(name, [], patience=0.0)


def start(program: str, job: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, guard.MARK: job},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def wait_ready(child: subprocess.Popen[bytes]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"


@linux
def test_escaped_grandchild_is_found_and_ended(job: str) -> None:
    with start(ESCAPING, job) as child:
        wait_ready(child)
        assert child.wait(10) == 0
        (found,) = guard.survivors(job, [])
        assert psutil.Process(found).cmdline()[-1] == STUBBORN
        assert guard.end(job, [], patience=0.1) == set()
        # Where no process reaps orphans (in containers), it stays as a zombie.
        assert not psutil.pid_exists(found) or psutil.Process(found).status() == psutil.STATUS_ZOMBIE


def test_group_is_found_and_ended_without_the_mark(job: str) -> None:
    with start(STUBBORN, "another" + job) as child:
        wait_ready(child)
        assert guard.survivors(job, []) == set()
        assert guard.survivors(job, [child.pid]) in ({child.pid}, {-child.pid})
        guard.end(job, [child.pid], patience=0.0)
        assert child.wait(10) == -9


@linux
def test_neither_other_jobs_nor_zombies_nor_this_process_survive(job: str) -> None:
    with start("print('ready')", job) as child, start(STUBBORN, job + "0") as other:
        wait_ready(child)
        wait_ready(other)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert guard.survivors(job, [child.pid, os.getpgid(0)]) & {child.pid, os.getpid(), other.pid} == set()
        other.kill()


def run_guard(job: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-I", "-S", guard.__file__, job], stdin=subprocess.PIPE)


def test_guard_ends_the_job_when_its_pipe_closes(job: str) -> None:
    with start(STUBBORN, job) as child, run_guard(job) as watching:
        wait_ready(child)
        watching.communicate(f"{child.pid}\n".encode(), timeout=10)
        assert child.wait(10) == -9
        assert watching.returncode == 0


def test_guard_ends_nothing_when_the_launch_is_done(job: str) -> None:
    with start(STUBBORN, job) as child, run_guard(job) as watching:
        wait_ready(child)
        watching.communicate(f"{child.pid}\n{guard.DONE}\n".encode(), timeout=10)
        assert watching.returncode == 0
        assert child.poll() is None
        child.kill()


def test_guard_imports_the_standard_library_only() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print(*sys.modules)"
    told = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, guard.__file__], capture_output=True, text=True, check=True
    )
    assert "kvstore" not in told.stdout
