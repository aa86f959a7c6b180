"""Jobs of real processes: `run_job` launches a script, or a function of the test, as the workers of a whole job.

A worker function stands in the test module, so that it is linted and type-checked, but runs in processes of its own:
its text is copied into a script that begins with `PRELUDE`. It can use the names of the prelude, its arguments (which
travel as JSON) and the functions given as `uses`, and returns something JSON can hold.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

import kvstore
from kvstore.server.status import ask_status

Worker: TypeAlias = str | Callable[..., Any]

ENVIRONMENT: Mapping[str, str] = {
    "KVSTORE_TIMEOUT": "40",
    "KVSTORE_HEARTBEAT": "0.5",
    "KVSTORE_DEAD_AFTER": "15",
    "KVSTORE_KERNELS": "numpy",
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
"""For all processes of a job; `env` of a run wins. Kernels: others take half a second of each process to load."""

PATIENCE = 60.0
"""Seconds after which a test gives up waiting for something that should come soon; no test measures by it."""


def await_file(path: Path, limit: float, *others: int) -> bool:
    """Wait for a file that comes whole, by a rename.

    Returns: True once it is there; False after `limit` seconds, or once a file descriptor of `others` is readable.
    """
    system = ctypes.CDLL(None)
    watch = system.inotify_init1(os.O_CLOEXEC)
    try:
        assert system.inotify_add_watch(watch, os.fsencode(path.parent), 0x180) >= 0  # IN_CREATE, IN_MOVED_TO
        end = time.monotonic() + limit
        while not path.exists():
            ready, _, _ = select.select([watch, *others], [], [], max(0.0, end - time.monotonic()))
            if watch not in ready:
                return path.exists()
            os.read(watch, 1 << 16)
        return True
    finally:
        os.close(watch)


PRELUDE = f'''
from __future__ import annotations
import ctypes, json, os, pathlib, select, sys, time
from pathlib import Path
from typing import Any
import numpy as np
import kvstore
from kvstore.errors import *
from kvstore import errors

FOLDER = Path(__file__).parent
RANK = int(os.environ.get("DMLC_WORKER_ID", "-1"))
NAME = os.environ.get("RESULT", RANK)

{inspect.getsource(await_file)}

def caught(call, *args, **kwargs):
    """The error that a call raises, as [class name, text, facts]; None if it raises none."""
    try:
        call(*args, **kwargs)
    except errors.KVStoreError as error:
        return [type(error).__name__, str(error), error.facts]
    return None

def report(value):
    """What this worker found out; the test finds it in `results[rank]`."""
    kept = FOLDER / f"result-{{NAME}}.part"
    kept.write_text(json.dumps(value, default=lambda array: array.tolist()))
    kept.rename(FOLDER / f"result-{{NAME}}.json")

def wait_for(name):
    """Wait for a file in the folder that the job's processes and the test share."""
    if not await_file(FOLDER / name, {PATIENCE}):
        raise TimeoutError(name)

def tell(name, text=""):
    """Create that file, whole."""
    (FOLDER / f"{{name}}.part{{NAME}}").write_text(text)
    (FOLDER / f"{{name}}.part{{NAME}}").rename(FOLDER / name)
'''


@dataclass
class JobResult:
    """Exit code of the launch (None: it was killed at the limit), all output, and what each rank reported."""

    code: int | None
    output: str
    results: list[Any]
    folder: Path

    def ok(self) -> list[Any]:
        """The results, after checking that the job ended well and every rank reported."""
        assert self.code == 0 and None not in self.results, f"exit code {self.code}\n{self.output}"
        return self.results


@dataclass
class Job:
    """A job that runs. `folder` is shared with its processes: see `tell` and `wait_for` in the prelude."""

    process: subprocess.Popen[bytes]
    folder: Path
    workers: int
    timeout: float
    finished: JobResult | None = field(default=None)

    def wait_for(self, name: str) -> str:
        """Wait for a file that a process of the job makes by `tell`; returns its text. Fails when the job ends."""
        path = self.folder / name
        ended = os.pidfd_open(self.process.pid)
        try:
            assert await_file(path, self.timeout, ended), f"no {name!r}\n{self.finish().output}"
        finally:
            os.close(ended)
        return path.read_text()

    def tell(self, name: str, text: str = "") -> None:
        """Make a file that the processes of the job `wait_for`."""
        (self.folder / f"{name}.part").write_text(text)
        (self.folder / f"{name}.part").rename(self.folder / name)

    def finish(self) -> JobResult:
        """Wait for its end, at most `timeout` seconds; then it is killed."""
        if self.finished is None:
            code = self._wait()
            output = (self.folder / "output").read_text(errors="replace")
            self.finished = JobResult(code, output, [self._result(rank) for rank in range(self.workers)], self.folder)
        return self.finished

    def _wait(self) -> int | None:
        try:
            return self.process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            self.stop()
            return None

    def processes(self, role: str) -> list[psutil.Process]:
        """Its processes of a role, by rank."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            environment = process.environ()
            if environment.get("DMLC_ROLE") == role and process.ppid() == self.process.pid:
                found[int(environment.get(f"DMLC_{role.upper()}_ID", "0"))] = process
        return [found[rank] for rank in sorted(found)]

    def stop(self) -> None:
        """End it: the launcher ends its processes on SIGTERM, and its guard does should the launcher be killed."""
        for number, patience in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
            if self.process.poll() is None:
                self.process.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(patience)

    def _result(self, rank: int) -> Any:
        path = self.folder / f"result-{rank}.json"
        return json.loads(path.read_text()) if path.exists() else None


class Jobs:
    """Starts jobs in folders of their own below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.count = 0

    def __call__(self, worker: Worker, workers: int = 2, servers: int = 2, **options: Any) -> JobResult:
        """Run a job to its end. Options are those of `start`."""
        with self.start(worker, workers, servers, **options) as job:
            return job.finish()

    @contextmanager
    def start(
        self,
        worker: Worker,
        workers: int = 2,
        servers: int = 2,
        *,
        env: Mapping[str, str] | None = None,
        args: Mapping[str, Any] | None = None,
        uses: Sequence[Callable[..., Any]] = (),
        modules: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        timeout: float = 100.0,
    ) -> Iterator[Job]:
        """Start a job; whatever of it is left when the block ends is ended.

        Args:
            worker: a function, or the text of a script.
            env: variables for all processes.
            args: what the function is called with.
            uses: functions and classes of the test module that `worker` needs.
            modules: name -> text of modules that the servers import first and workers can import.
            options: further options of `kvstore-server launch`.
            timeout: seconds until the job is killed.
        """
        folder = self.root / f"job{self.count}"
        self.count += 1
        folder.mkdir()
        script = folder / "worker.py"
        script.write_text(_script(worker, args or {}, uses))
        for name, text in (modules or {}).items():
            (folder / f"{name}.py").write_text(text)
            options = [*options, "--import", name]
        argv = [sys.executable, "-m", "kvstore.server", "launch", "-n", str(workers), "-s", str(servers)]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [*argv, *options, "--", sys.executable, str(script)],
                cwd=folder, env=_environment(folder, env or {}), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        job = Job(process, folder, workers, timeout)
        try:
            yield job
        finally:
            job.stop()


class ByHand:
    """A job whose processes a test starts one by one; nobody but the scheduler watches over them.

    Their output is in `folder`/NAME.output, what workers report in `result(NAME)`; `run_job`'s prelude serves too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment: dict[str, str] = {}
        self.processes: list[subprocess.Popen[bytes]] = []

    def scheduler(
        self, workers: int, servers: int, *options: str, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start the scheduler, wait until it listens; the others find it. `env`: variables of all processes."""
        self.environment = {"DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": str(servers), **(env or {})}
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as told:
            argv = ["-m", "kvstore.server", "scheduler", "--port", "0", "--ready-fd", str(writing), *options]
            process = self._start("scheduler", argv, {}, (writing,))
            os.close(writing)
            endpoint = told.readline().decode().strip()
        assert endpoint, (self.folder / "scheduler.output").read_text()
        self.environment.setdefault("DMLC_PS_ROOT_URI", "127.0.0.1")
        self.environment["DMLC_PS_ROOT_PORT"] = endpoint.rpartition(":")[2]
        return process

    def server(self, rank: int, *options: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a server."""
        argv = ["-m", "kvstore.server", "server", *options]
        return self._start(f"server{rank}", argv, {"DMLC_SERVER_ID": str(rank), **env})

    def worker(
        self, name: str, worker: Worker, uses: Sequence[Callable[..., Any]] = (), **env: str
    ) -> subprocess.Popen[bytes]:
        """Start a worker that runs a function or a script."""
        script = self.folder / f"{name}.py"
        script.write_text(_script(worker, {}, uses))
        return self._start(name, [str(script)], {"RESULT": name, **env})

    def wait_for(self, *names: str) -> None:
        """Wait for files that workers `tell`."""
        for name in names:
            assert await_file(self.folder / name, PATIENCE), f"{name} does not come"

    def tell(self, name: str) -> None:
        """Make a file that workers `wait_for`."""
        (self.folder / name).touch()

    def ended(self, *processes: subprocess.Popen[bytes]) -> list[int]:
        """Wait for the end of processes; their exit codes."""
        return [process.wait(PATIENCE) for process in processes]

    def wait_until_registered(self, count: int) -> None:
        """Wait until so many processes have registered at the scheduler."""
        endpoint = f"tcp://127.0.0.1:{self.environment['DMLC_PS_ROOT_PORT']}"
        end = time.monotonic() + PATIENCE
        while len(ask_status(endpoint, PATIENCE).processes) < count:
            assert time.monotonic() < end, f"{count} processes do not come"

    def result(self, name: str) -> Any:
        """What a worker reported, once it has ended."""
        path = self.folder / f"result-{name}.json"
        assert path.exists(), (self.folder / f"{name}.output").read_text()
        return json.loads(path.read_text())

    def stop(self) -> None:
        """End whatever runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(5.0)

    def _start(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], fds: tuple[int, ...] = ()
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *argv], cwd=self.folder, env=_environment(self.folder, {**self.environment, **env}),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, pass_fds=fds,
            )  # fmt: skip
        self.processes.append(process)
        return process


def _script(worker: Worker, args: Mapping[str, Any], uses: Sequence[Callable[..., Any]]) -> str:
    if isinstance(worker, str):
        return f"{PRELUDE}\n{textwrap.dedent(worker)}"
    texts = [textwrap.dedent(inspect.getsource(function)) for function in (*uses, worker)]
    call = f"if __name__ == '__main__':\n    report({worker.__name__}(**json.loads({json.dumps(dict(args))!r})))"
    return "\n\n".join([PRELUDE, *texts, call, ""])


def _environment(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "KVSTORE_"))}
    paths = [str(folder), str(Path(kvstore.__file__).resolve().parents[1]), inherited.get("PYTHONPATH", "")]
    return {**inherited, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **env}


@pytest.fixture
def end_of() -> Callable[..., tuple[int, str, float]]:
    """`end_of(*arguments, **variables)` runs `kvstore-server`: exit code, output, seconds (at most `PATIENCE`)."""

    def run(*arguments: str, **variables: str) -> tuple[int, str, float]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "KVSTORE_"))}
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.server", *arguments], env={**inherited, **variables}, timeout=PATIENCE,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, time.monotonic() - began

    return run


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[ByHand]:
    """A job whose processes the test starts one by one."""
    job = ByHand(tmp_path)
    yield job
    job.stop()


@pytest.fixture
def run_job(tmp_path: Path) -> Jobs:
    """`run_job(worker, workers=2, servers=2, env=..., args=..., ...)` to a JobResult; `run_job.start` for more."""
    return Jobs(tmp_path)
