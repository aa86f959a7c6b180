"""Stand-ins for the processes of a launch."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from kvstore.server.launch_plan import Plan

# The scheduler tells its port and ends on a message; a server ends with the scheduler. DRAIN: they never do.
STAND_IN = """
import os, socket, signal, sys
if sys.argv[1] == "scheduler":
    listener = socket.create_server(("127.0.0.1", 0))
    os.write(int(sys.argv[-1]), b"tcp://127.0.0.1:%d\\n" % listener.getsockname()[1])
    kept = []
    while True:
        connection = listener.accept()[0]
        kept.append(connection)
        if connection.recv(1) == b"x":
            break
else:
    connection = socket.create_connection(("127.0.0.1", int(os.environ["DMLC_PS_ROOT_PORT"])))
    connection.send(b"s")
    connection.recv(1)
"""


def _stand_in(role: str) -> tuple[str, ...]:
    return sys.executable, "-c", STAND_IN, role


def _plan(program: str, *arguments: str, **settings: Any) -> Plan:
    defaults: dict[str, Any] = {
        "workers": 2,
        "servers": 1,
        "grace": 0.3,
        "scheduler": _stand_in("scheduler"),
        "server": _stand_in("server"),
        "job": secrets.token_hex(8),
    }
    return Plan(command=(sys.executable, "-c", program, *arguments), **{**defaults, **settings})


def _living(job: str) -> list[psutil.Process]:
    """Processes that carry the job's mark, zombies excepted."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("KVSTORE_JOB") == job:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    """(program text, *arguments, **fields of Plan) to a plan of 2 workers and 1 server over the stand-ins."""
    return _plan


@pytest.fixture
def living() -> Callable[[str], list[psutil.Process]]:
    """Job id to the processes of that job that live, found without the code under test."""
    return _living
