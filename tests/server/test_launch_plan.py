"""Programs and environments of the processes of a launch."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvstore.config import read_config
from kvstore.errors import ConfigError, ParameterError
from kvstore.messages import Role
from kvstore.server.launch_plan import Plan, variables
from kvstore.server.malloc import MALLOC_ENVIRONMENT
from kvstore.server.supervision import Process

SCHEDULER, SERVER, WORKER = Process(Role.SCHEDULER, 0), Process(Role.SERVER, 1), Process(Role.WORKER, 2)


def plan(**settings: Any) -> Plan:
    return Plan(**{"command": (sys.executable, "-c", "pass"), "workers": 3, "servers": 2, **settings})


def test_environment_of_each_role_is_what_the_config_reads() -> None:
    made = plan(port=0)
    for process in (SCHEDULER, SERVER, WORKER):
        config = read_config(made.environment(process, 4711, {}))
        assert (config.role, config.root_uri, config.root_port) == (process.role, "127.0.0.1", 4711)
        assert (config.num_workers, config.num_servers, config.job) == (3, 2, made.job)
    assert made.environment(SERVER, 1, {})["DMLC_SERVER_ID"] == "1"
    assert made.environment(WORKER, 1, {})["DMLC_WORKER_ID"] == "2"


def test_what_an_outer_job_left_is_dropped_and_everything_else_kept() -> None:
    outer = {
        "DMLC_ROLE": "worker",
        "DMLC_WORKER_ID": "7",
        "DMLC_SERVER_ID": "7",
        "KVSTORE_JOB": "outer",
        "DMLC_INTERFACE": "lo",
        "HOME": "/home/me",
    }
    made = plan()
    server, worker = made.environment(SERVER, 1, outer), made.environment(WORKER, 1, outer)
    assert "DMLC_WORKER_ID" not in server
    assert "DMLC_SERVER_ID" not in worker
    assert (worker["DMLC_WORKER_ID"], worker["KVSTORE_JOB"]) == ("2", made.job)
    assert (worker["DMLC_INTERFACE"], worker["HOME"]) == ("lo", "/home/me")


def test_every_launch_has_its_own_job() -> None:
    assert len({plan().job for _ in range(10)}) == 10


def test_malloc_is_set_unless_already() -> None:
    assert plan().environment(WORKER, 1, {}).items() >= MALLOC_ENVIRONMENT.items()
    assert plan().environment(WORKER, 1, {"MALLOC_ARENA_MAX": "4"})["MALLOC_ARENA_MAX"] == "4"
    assert plan(env={"MALLOC_ARENA_MAX": "5"}).environment(WORKER, 1, {})["MALLOC_ARENA_MAX"] == "5"


def test_variables_go_where_they_were_meant() -> None:
    made = plan(env={"A": "all", "B": "all"}, worker_env={"B": "worker"}, server_env={"C": "server"})
    seen = {
        process: {name: value for name, value in made.environment(process, 1, {"A": "before"}).items() if name in "ABC"}
        for process in (SCHEDULER, SERVER, WORKER)
    }
    assert seen == {
        SCHEDULER: {"A": "all", "B": "all"},
        SERVER: {"A": "all", "B": "all", "C": "server"},
        WORKER: {"A": "all", "B": "worker"},
    }


def test_programs() -> None:
    made = plan(command=(sys.executable, "a b", "*"), imports=("mine", "yours"))
    assert made.argv(WORKER) == [sys.executable, "a b", "*"]
    assert made.argv(SCHEDULER) == [sys.executable, "-m", "kvstore.server", "scheduler"]
    assert made.argv(SERVER) == [
        *[sys.executable, "-m", "kvstore.server", "server"],
        *["--import", "mine", "--import", "yours"],
    ]


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"workers": 0}, ParameterError, "workers is 0"),
        ({"servers": -1}, ParameterError, "servers is -1"),
        ({"command": ()}, ConfigError, "kvstore-server launch"),
        ({"command": ("no-such-program",)}, ConfigError, "no-such-program"),
        ({"command": (sys.executable,), "worker_env": {"PATH": "/nowhere"}}, None, ""),
        ({"command": ("sh",), "worker_env": {"PATH": "/nowhere"}}, ConfigError, "'sh' is not found"),
        ({"env": {"DMLC_ROLE": "x"}}, ParameterError, "DMLC_ROLE is set by the launcher"),
    ],
)
def test_bad_plans(settings: dict[str, Any], error: type[ConfigError] | None, text: str) -> None:
    if error is None:
        plan(**settings)
        return
    with pytest.raises(error, match=text):
        plan(**settings)


def test_variables() -> None:
    text = 'sp ace "quo\'te" $HOME\nnew=line'
    assert variables([f"A={text}", "B=", "C"], {"C": "here", "A": "x"}) == {"A": text, "B": "", "C": "here"}


@pytest.mark.parametrize("given", ["UNSET", "=value", "", "A=\0"])
def test_bad_variables(given: str) -> None:
    with pytest.raises(ParameterError, match="--env"):
        variables([given], {"C": "here"})
