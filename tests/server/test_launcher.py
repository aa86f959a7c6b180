"""Launches of real processes, with stand-ins for scheduler and servers: output, exit codes, nothing left."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

from kvstore.messages import Exited, Role
from kvstore.server.launch_plan import Plan
from kvstore.server.launcher import launch

Planner: TypeAlias = Callable[..., Plan]
Living: TypeAlias = Callable[[str], list[psutil.Process]]

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
WAITING = "import signal; print('ready', flush=True); signal.pause()"


class Link:
    """Keeps what the scheduler is told, and ends the stand-in when all workers have ended."""

    def __init__(self, endpoint: str, job: str, workers: int) -> None:
        self.port, self.job, self.workers = int(endpoint.rpartition(":")[2]), job, workers
        self.told: list[Exited] = []
        self.closed = False

    def tell(self, message: Exited | None = None) -> None:
        if message is None:
            return
        self.told.append(message)
        ended = [told.role for told in self.told].count(Role.WORKER)
        if message.role is Role.WORKER and ended == self.workers:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as connection:
                connection.send(b"x")

    def close(self) -> None:
        self.closed = True


class Result:
    """A launch in this process: exit code, lines of output, what the scheduler was told."""

    def __init__(self, plan: Plan, tmp_path: Path, drain: float = 10.0) -> None:
        self.links: list[Link] = []
        out, err = tmp_path / f"{plan.job}.out", tmp_path / f"{plan.job}.err"
        with out.open("wb") as out_file, err.open("wb") as err_file:
            self.code = launch(
                plan,
                out=out_file.fileno(),
                err=err_file.fileno(),
                link=self._link(plan.workers),
                drain=drain,
                patience=0.3,
            )
        self.out, self.err = out.read_bytes(), err.read_bytes().decode()

    def _link(self, workers: int) -> Callable[[str, str], Link]:
        def connect(endpoint: str, job: str) -> Link:
            self.links.append(Link(endpoint, job, workers))
            return self.links[-1]

        return connect

    @property
    def lines(self) -> list[str]:
        return sorted(self.out.decode().splitlines())

    @property
    def last(self) -> str:
        return self.err.splitlines()[-1]


def test_success(tmp_path: Path, make_plan: Planner, living: Living) -> None:
    program = """
import os, sys
print(os.environ["DMLC_WORKER_ID"], os.environ["DMLC_ROLE"], os.environ["DMLC_NUM_SERVER"], sys.argv[1:])
print("no newline", end="")
print("to stderr", file=sys.stderr)
"""
    made = make_plan(program, "two words", "*", servers=2)
    result = Result(made, tmp_path)
    assert result.code == 0, result.err
    assert result.lines == [
        "worker 0 | 0 worker 2 ['two words', '*']",
        "worker 0 | no newline",
        "worker 1 | 1 worker 2 ['two words', '*']",
        "worker 1 | no newline",
    ]
    assert sorted(result.err.splitlines()) == ["worker 0 | to stderr", "worker 1 | to stderr"]
    assert living(made.job) == []
    (link,) = result.links
    assert link.closed and link.job == made.job
    assert {(told.role, told.rank, told.code) for told in link.told} >= {(Role.WORKER, 0, 0), (Role.WORKER, 1, 0)}


def test_failing_worker(tmp_path: Path, make_plan: Planner, living: Living) -> None:
    program = "import os, sys, signal\nif os.environ['DMLC_WORKER_ID'] == '1': sys.exit(3)\nsignal.pause()"
    made = make_plan(program)
    result = Result(made, tmp_path)
    assert result.code == 3
    assert result.last == "kvstore-server: worker 1 exited with code 3"
    assert result.links[0].told[0] == Exited(role=Role.WORKER, rank=1, code=3)
    assert living(made.job) == []


def test_survivors_may_save_and_the_first_failure_counts(tmp_path: Path, make_plan: Planner) -> None:
    """The survivor learns of the failure (here: by a file), saves and fails too; its code does not matter."""
    saved = tmp_path / "saved"
    os.mkfifo(tmp_path / "failed")
    program = f"""
import os, sys
if os.environ["DMLC_WORKER_ID"] == "0":
    open({str(tmp_path / "failed")!r}, "w").close()
    os.kill(os.getpid(), 9)
open({str(tmp_path / "failed")!r}).read()
open({str(saved)!r}, "w").close()
sys.exit(7)
"""
    result = Result(make_plan(program, grace=10.0), tmp_path)
    assert (result.code, result.last) in (
        (137, "kvstore-server: worker 0 was killed by SIGKILL"),
        (7, "kvstore-server: worker 1 exited with code 7"),  # the launcher may see this one first
    )
    assert saved.exists()


def test_killed_server(tmp_path: Path, make_plan: Planner, living: Living) -> None:
    made = make_plan(
        "import signal; signal.pause()", server=(sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    )
    result = Result(made, tmp_path)
    assert (result.code, result.last) == (137, "kvstore-server: server 0 was killed by SIGKILL")
    assert living(made.job) == []


def test_scheduler_that_cannot_start(tmp_path: Path, make_plan: Planner) -> None:
    program = "import sys; print('port 4711 is in use', file=sys.stderr); sys.exit(2)"
    made = make_plan("print('never')", scheduler=(sys.executable, "-c", program))
    result = Result(made, tmp_path)
    assert result.code == 2
    assert "scheduler | port 4711 is in use" in result.err
    assert result.last == "kvstore-server: scheduler exited with code 2 before the job had started"
    assert result.out == b""


def test_scheduler_that_talks_nonsense(tmp_path: Path, make_plan: Planner) -> None:
    program = "import os, signal, sys; os.write(int(sys.argv[-1]), b'hello\\n'); signal.pause()"
    result = Result(make_plan("print('never')", scheduler=(sys.executable, "-c", program)), tmp_path)
    assert (result.code, result.last) == (1, "kvstore-server: the scheduler told no port, but 'hello'")


def test_server_program_that_cannot_be_started(tmp_path: Path, make_plan: Planner, living: Living) -> None:
    made = make_plan("print('never')", server=("/no/such/program",))
    result = Result(made, tmp_path)
    assert result.code == 1
    assert result.last.startswith("kvstore-server: cannot start server 0: ")
    assert result.out == b"" and living(made.job) == []


def test_servers_that_do_not_end_are_stopped(tmp_path: Path, make_plan: Planner, living: Living) -> None:
    made = make_plan("print('done')", server=(sys.executable, "-c", WAITING))
    result = Result(made, tmp_path, drain=0.2)
    assert result.code == 0
    assert "every worker has ended, but not" in result.err and "server 0" in result.err
    assert living(made.job) == []


def test_worker_that_ignores_sigterm(tmp_path: Path, make_plan: Planner, living: Living) -> None:
    program = f"import os, sys\nif os.environ['DMLC_WORKER_ID'] == '1': sys.exit(3)\n{STUBBORN}"
    made = make_plan(program)
    result = Result(made, tmp_path)
    assert result.code == 3
    assert living(made.job) == []


@pytest.mark.parametrize("session", [False, True], ids=["same session", "own session"])
@pytest.mark.parametrize("code", [0, 5])
def test_grandchildren_are_ended(tmp_path: Path, session: bool, code: int, make_plan: Planner, living: Living) -> None:
    program = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE, start_new_session={session})
child.stdout.readline()
sys.exit({code})
"""
    made = make_plan(program, workers=1)
    result = Result(made, tmp_path)
    assert result.code == code
    assert "ending 1 processes that the job left behind" in result.err
    assert living(made.job) == []


def test_lines_are_whole_and_garbage_passes(tmp_path: Path, make_plan: Planner) -> None:
    program = """
import os
for _ in range(300):
    for part in (b"<" + b"x" * 700, b"y" * 700 + b">\\n"):
        os.write(1, part)
os.write(1, b"\\xff\\x00\\xfe\\n")
"""
    result = Result(make_plan(program, workers=3), tmp_path)
    found = result.out.splitlines()
    assert len(found) == 3 * 301
    whole = re.compile(rb"worker \d \| (<x{700}y{700}>|\xff\x00\xfe)")
    assert all(whole.fullmatch(line) for line in found)


def test_two_launches_at_once(tmp_path: Path, make_plan: Planner) -> None:
    """Also: a launch outside the main thread, where signals cannot be caught."""
    barrier = tmp_path / "both"
    os.mkfifo(barrier)  # opened by the one for reading and by the other for writing: both run at the same time
    first = make_plan(f"print(len(open({str(barrier)!r}).read()))", workers=1)
    second = make_plan(f"open({str(barrier)!r}, 'w').write('12345')", workers=1)
    results: dict[str, Result] = {}
    threads = [
        threading.Thread(target=lambda made=made: results.update({made.job: Result(made, tmp_path)}))
        for made in (first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [results[made.job].code for made in (first, second)] == [0, 0]
    assert results[first.job].out == b"worker 0 | 5\n"
    ports = {result.links[0].port for result in results.values()}
    assert len(ports) == 2


def test_signal_handlers_and_descriptors_are_given_back(tmp_path: Path, make_plan: Planner) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    Result(make_plan("pass", workers=1), tmp_path)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    Result(make_plan("pass", workers=1), tmp_path)
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
