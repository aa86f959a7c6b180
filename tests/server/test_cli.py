"""The command: options become settings, errors become one readable message and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from kvstore.config import ENVIRONMENT, Config, TransportName
from kvstore.errors import KVStoreError
from kvstore.messages import Role
from kvstore.server import cli as cli_module
from kvstore.server.cli import cli
from kvstore.server.launch_plan import Plan

JOB = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "4711", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ENVIRONMENT.values():
        monkeypatch.delenv(variable, raising=False)


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, arguments, env=environment)


def clean(result: Result, code: int) -> str:
    """The one message of a failed command, without a traceback."""
    assert result.exit_code == code, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result.stderr


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have run: (Config, ready fd), (Config, imports); both end with code 7."""
    found: list[Any] = []

    def record(config: Config, more: object) -> int:
        found.append((config, more))
        return 7

    for name in ("_run_scheduler", "_run_server"):
        monkeypatch.setattr(cli_module, name, record)
    return found


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plan that would have been launched."""
    found: list[Plan] = []

    def record(plan: Plan) -> int:
        found.append(plan)
        return 7

    monkeypatch.setattr("kvstore.server.launcher.launch", record)
    return found


# --- roles ------------------------------------------------------------------------------------------------------------


def test_without_command_the_role_is_read_from_the_environment(ran: list[Any]) -> None:
    assert run(DMLC_ROLE="scheduler", **JOB).exit_code == 7
    assert run(DMLC_ROLE="server", **JOB).exit_code == 7
    assert [(config.role, config.root_port, more) for config, more in ran] == [
        (Role.SCHEDULER, 4711, None),
        (Role.SERVER, 4711, ()),
    ]


@pytest.mark.parametrize("role", ["", "worker"])
def test_without_command_and_role_there_is_help(role: str, ran: list[Any]) -> None:
    result = run(DMLC_ROLE=role)
    assert result.exit_code == 2
    assert "Usage: kvstore-server" in result.stderr or "Usage: cli" in result.stderr
    assert ran == []


def test_unknown_role() -> None:
    assert clean(run(DMLC_ROLE="wroker"), 2) == (
        "kvstore-server: DMLC_ROLE is 'wroker'; allowed are scheduler, server, worker\n"
    )


def test_options_of_a_server(ran: list[Any]) -> None:
    options = "-n 3 --servers 2 --root-uri 10.0.0.1 --root-port 9000 --host 0.0.0.0 --port 9100-9110 --interface eth1"
    more = "--insecure --transport tcp --timeout 2.5 --log info --import mine --import yours"
    assert run("server", *options.split(), *more.split()).exit_code == 7
    ((config, imports),) = ran
    assert config == Config(
        role=Role.SERVER, num_workers=3, num_servers=2, root_uri="10.0.0.1", root_port=9000, bind_host="0.0.0.0",
        port="9100-9110", interface="eth1", insecure=True, transport=TransportName.TCP, timeout=2.5, log="info",
    )  # fmt: skip
    assert imports == ("mine", "yours")


def test_options_win_over_the_environment(ran: list[Any]) -> None:
    run("server", "--root-port", "1", KVSTORE_INSECURE="1", **JOB)
    ((config, _),) = ran
    assert (config.root_port, config.num_workers, config.insecure) == (1, 2, True)


def test_scheduler_takes_its_port_by_either_name(ran: list[Any]) -> None:
    for option in ("--port", "--root-port"):
        run("scheduler", "-n", "1", "-s", "1", option, "9000", "--ready-fd", "5")
    assert [(c.role, c.root_uri, c.root_port, fd) for c, fd in ran] == [(Role.SCHEDULER, "127.0.0.1", 9000, 5)] * 2


def test_missing_settings_are_all_named() -> None:
    text = clean(run("server"), 2)
    assert all(variable in text for variable in JOB) and "kvstore-server launch" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("server", "--root-port", "x"), "DMLC_PS_ROOT_PORT"),
        (("server", "-n", "0"), "DMLC_NUM_WORKER"),
        (("server", "--timeout", "-1"), "KVSTORE_TIMEOUT"),
        (("server", "--transport", "pigeon"), "KVSTORE_TRANSPORT"),
        (("scheduler", "--root-port", "70000"), "DMLC_PS_ROOT_PORT"),
        (("launch", "-n", "1", "--log", "loud", "true"), "KVSTORE_LOG"),
        (("launch", "-n", "1", "--timeout", "soon", "true"), "KVSTORE_TIMEOUT"),
        (("launch", "-n", "0", "true"), "workers is 0"),
        (("launch", "-n", "1", "no-such-command"), "'no-such-command' is not found"),
        (("launch", "-n", "1", "--env", "NO_SUCH_VARIABLE", "true"), "NO_SUCH_VARIABLE"),
        (("launch", "-n", "1"), "COMMAND"),
        (("status", "--root-port", "1"), "DMLC_PS_ROOT_URI"),
        (("nonsense",), "No such command"),
    ],
)
def test_wrong_settings(arguments: tuple[str, ...], text: str) -> None:
    environment = {} if arguments[0] == "status" else JOB
    assert text in clean(run(*arguments, **environment), 2)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KVStoreError("it broke"), 1, "kvstore-server: it broke\n"),
        (ZeroDivisionError("no"), 1, "kvstore-server: ZeroDivisionError: no (KVSTORE_LOG=debug shows where)\n"),
        (KeyboardInterrupt(), 130, "kvstore-server: interrupted\n"),
    ],
)
def test_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(cli_module, "_run_server", fail)
    assert clean(run("server", **JOB), code) == text


# --- launch -----------------------------------------------------------------------------------------------------------


def test_launch_options(planned: list[Plan]) -> None:
    options = "-n 3 -s 2 --host localhost --port 9000 --grace 1.5 --no-prefix --import mine --interface lo"
    variables = ["--env", "A=x y", "--env", "HERE", "--worker-env", "B=1", "--server-env", "C=2"]
    settings = "--insecure --timeout 7 --transport ipc --log info"
    command = [sys.executable, "a.py", "--lr", "0.1", "-n", "5", "two words", "*"]
    result = run("launch", *options.split(), *variables, *settings.split(), "--", *command, HERE="here")
    assert result.exit_code == 7, result.output
    (plan,) = planned
    assert (plan.workers, plan.servers, plan.host, plan.port) == (3, 2, "localhost", 9000)
    assert (plan.grace, plan.prefixed, plan.imports, list(plan.command)) == (1.5, False, ("mine",), command)
    assert (plan.worker_env, plan.server_env) == ({"B": "1"}, {"C": "2"})
    assert plan.env == {
        "A": "x y", "HERE": "here", "DMLC_INTERFACE": "lo", "KVSTORE_INSECURE": "1", "KVSTORE_TIMEOUT": "7",
        "KVSTORE_TRANSPORT": "ipc", "KVSTORE_LOG": "info",
    }  # fmt: skip


def test_launch_needs_no_dashes_before_the_command(planned: list[Plan]) -> None:
    run("launch", "-n", "1", sys.executable, "-n", "--help", DMLC_ROLE="nonsense of an outer job")
    assert planned[0].command == (sys.executable, "-n", "--help")
    assert (planned[0].servers, planned[0].port, planned[0].env) == (1, 0, {})


def test_launch_grants_the_time_in_which_a_dead_scheduler_is_noticed(planned: list[Plan]) -> None:
    run("launch", "-n", "1", sys.executable)
    run("launch", "-n", "1", "--env", "KVSTORE_DEAD_AFTER=3", sys.executable, KVSTORE_HEARTBEAT="0.5")
    assert [plan.notice for plan in planned] == [17.0, 4.0]


# --- tools ------------------------------------------------------------------------------------------------------------


def test_codecs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("codecs")
    assert result.exit_code == 0 and "2bit" in result.output and "threshold" in result.output
    assert "no_such_module" in clean(run("codecs", "--import", "no_such_module"), 2)


def test_demo_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    module = ModuleType("kvstore.server.demo")
    module.run_demo = lambda **options: found.update(options) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvstore.server.demo", module)
    options = "--data fashion-mnist --epochs 3 -n 4 -s 2 --threshold 0.25 --output out --seed 9 --seeds 2"
    assert run("demo", *options.split()).exit_code == 7
    assert found == {
        "data": "fashion-mnist", "epochs": 3, "workers": 4, "servers": 2,
        "threshold": 0.25, "output": Path("out"), "seed": 9, "seeds": 2,
    }  # fmt: skip


def test_every_command_has_help() -> None:
    assert sorted(cli.commands) == ["bench-codec", "check", "codecs", "demo", "launch", "scheduler", "server", "status"]
    for name, command in cli.commands.items():
        result = run(name, "--help")
        assert result.exit_code == 0
        undocumented = [p.name for p in command.params if isinstance(p, click.Option) and not p.help and not p.hidden]
        assert undocumented == [] or name == "demo"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from kvstore.server.cli import cli; cli(['launch', '--help'], standalone_mode=False);"
        "print(sorted(sys.modules.keys() & {'zmq', 'numba', 'rich', 'safetensors'}))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "[]"


@pytest.fixture
def scheduler() -> Iterator[tuple[str, str]]:
    """Host and port of a running scheduler of 1 worker and 1 server, which have not come."""
    command = [sys.executable, "-m", "kvstore.server", "scheduler", "-n", "1", "-s", "1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("scheduler listens at tcp://127.0.0.1:")
        yield "127.0.0.1", line.strip().rpartition(":")[2]
        process.terminate()
        assert process.wait(20) == 143


def test_status_and_check_of_a_real_scheduler(scheduler: tuple[str, str]) -> None:
    host, port = scheduler
    shown = run("status", "--root-uri", host, "--root-port", port)
    assert shown.exit_code == 0 and "1 server(s)" in shown.output and "missing" in shown.output
    found = json.loads(run("status", "--json", DMLC_PS_ROOT_URI=host, DMLC_PS_ROOT_PORT=port).output)
    assert found["scheduler"]["num_workers"] == 1
    checked = run("check", "--root-uri", host, "--root-port", port)
    assert checked.exit_code == 1
    assert [line[:16] for line in checked.output.splitlines() if line[0] != " "] == [
        "ok   scheduler: ", "FAIL server 0: h", "FAIL worker 0: h",
    ]  # fmt: skip


def test_status_without_scheduler() -> None:
    text = clean(run("status", "--root-uri", "127.0.0.1", "--root-port", "1", "--timeout", "0.2"), 1)
    assert "no answer from tcp://127.0.0.1:1 within 0.2 s" in text


def test_occupied_port_is_named(scheduler: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "kvstore.server", "launch", "-n", "1", "--port", scheduler[1], "--", "true"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=dict(os.environ))
    assert told.returncode == 2
    assert scheduler[1] in told.stderr and "Traceback" not in told.stderr
    last = told.stderr.splitlines()[-1]
    assert last == "kvstore-server: scheduler exited with code 2 before the job had started"
