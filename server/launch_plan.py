"""What a launch starts: the programs of the three roles and the environment of each process. Pure."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvstore.config import ENVIRONMENT
from kvstore.errors import ConfigError, ParameterError
from kvstore.messages import Role
from kvstore.server.malloc import MALLOC_ENVIRONMENT
from kvstore.server.supervision import Process

LOOPBACK = "127.0.0.1"

OWN = tuple(
    ENVIRONMENT[name]
    for name in ("role", "root_uri", "root_port", "num_workers", "num_servers", "worker_id", "server_id", "job")
)
"""Variables that the launcher sets itself, differently for each process."""


def _new_job() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One launch on this machine.

    Args:
        command: program and arguments of every worker; of `workers` workers, `servers` servers and one scheduler.
        host, port: where the scheduler listens; port 0 lets the system choose.
        imports: modules that servers import first; they register optimizers and codecs.
        env, worker_env, server_env: variables for all processes, for workers only, for servers only.
        grace: seconds that the other workers get after a failure, and all processes after a signal.
        notice: seconds more after the scheduler died: so long takes the silence by which the others know.
        prefixed: name the writer of every line; else processes write to the launcher's own output directly.
        scheduler, server: programs of these roles; the scheduler gets `--ready-fd N` appended.

    Raises:
        ParameterError: fewer than one worker or server, or a variable that the launcher sets itself.
        ConfigError: no command, or one that is not found.
    """

    command: tuple[str, ...]
    workers: int
    servers: int
    host: str = LOOPBACK
    port: int = 0
    imports: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    worker_env: Mapping[str, str] = field(default_factory=dict)
    server_env: Mapping[str, str] = field(default_factory=dict)
    grace: float = 5.0
    notice: float = 0.0
    prefixed: bool = True
    scheduler: tuple[str, ...] = (sys.executable, "-m", "kvstore.server", "scheduler")
    server: tuple[str, ...] = (sys.executable, "-m", "kvstore.server", "server")
    job: str = field(default_factory=_new_job)

    def __post_init__(self) -> None:
        for name, count in (("workers", self.workers), ("servers", self.servers)):
            if count < 1:
                raise ParameterError(f"{name} is {count}, must be at least 1", parameter=name, given=str(count))
        for variable in (*self.env, *self.worker_env, *self.server_env):
            if variable in OWN:
                raise ParameterError(f"{variable} is set by the launcher for each process", parameter=variable)
        if not self.command:
            raise ConfigError("no command to run in the workers: kvstore-server launch -n 2 -s 1 -- python train.py")
        path = {**self.env, **self.worker_env}.get("PATH", os.environ.get("PATH"))
        if shutil.which(self.command[0], path=path) is None:
            raise ConfigError(f"command {self.command[0]!r} is not found, or is not executable")

    @property
    def others(self) -> list[Process]:
        """All but the scheduler, in the order in which they start."""
        servers = [Process(Role.SERVER, rank) for rank in range(self.servers)]
        return servers + [Process(Role.WORKER, rank) for rank in range(self.workers)]

    def argv(self, process: Process) -> list[str]:
        """Program and arguments of a process."""
        match process.role:
            case Role.SCHEDULER:
                return list(self.scheduler)
            case Role.SERVER:
                return [*self.server, *(part for module in self.imports for part in ("--import", module))]
            case Role.WORKER:
                return list(self.command)

    def environment(self, process: Process, root_port: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Environment of a process: the inherited one, less what another job left in it, plus the plan's and ours."""
        kept = {name: value for name, value in inherited.items() if name not in OWN}
        extra = {Role.WORKER: self.worker_env, Role.SERVER: self.server_env}.get(process.role, {})
        own = {
            "DMLC_ROLE": str(process.role),
            "DMLC_PS_ROOT_URI": self.host,
            "DMLC_PS_ROOT_PORT": str(root_port),
            "DMLC_NUM_WORKER": str(self.workers),
            "DMLC_NUM_SERVER": str(self.servers),
            "KVSTORE_JOB": self.job,
        }
        if process.role is not Role.SCHEDULER:
            own[f"DMLC_{process.role.upper()}_ID"] = str(process.rank)
        return {**MALLOC_ENVIRONMENT, "PYTHONUNBUFFERED": "1", **kept, **self.env, **extra, **own}


def variables(given: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Read `NAME=value` and `NAME` (its value here) into a dictionary.

    Raises:
        ParameterError: a NAME without value is not set here, or is no name.
    """
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or "\0" in text:
            raise ParameterError(f"--env {text!r} is neither NAME=VALUE nor NAME", parameter="env", given=text)
        if not equals and name not in environment:
            raise ParameterError(f"--env {name}: no such variable is set here to pass on", parameter="env", given=text)
        found[name] = value if equals else environment[name]
    return found
