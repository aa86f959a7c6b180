"""The command `kvstore-server`: reads options, makes a Config or a Plan, calls one function.

Exit codes: 0 well, 1 something failed, 2 wrong options or settings, 128 + n ended by signal n; `launch` passes on the
code of the first process that failed. Imports that take time stand in the commands, so that help appears at once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvstore.config import ENVIRONMENT, REQUIRED, Config, read_config
from kvstore.errors import ConfigError, KVStoreError, ParameterError
from kvstore.messages import Role

F = TypeVar("F", bound=Callable[..., Any])
INTERRUPTED = 130
SETTINGS = {"max_content_width": 110}

_LEVELS = ("debug", "info", "warning", "error", "critical")


class Commands(click.Group):
    """Turns every error into one readable message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, which returns its exit code; see the module's text."""
        try:
            ctx.exit(super().invoke(ctx) or 0)
        except ConfigError as error:
            raise _WrongSetting(str(error)) from error
        except KVStoreError as error:
            raise _Failure(str(error)) from error
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt as error:
            raise _Interrupted("interrupted") from error
        except Exception as error:
            if logging.getLogger().isEnabledFor(logging.DEBUG):
                raise
            raise _Failure(f"{type(error).__name__}: {error} (KVSTORE_LOG=debug shows where)") from error


class _Failure(click.ClickException):
    exit_code = 1

    def show(self, file: Any = None) -> None:
        click.echo(f"kvstore-server: {self.message}", err=True)


class _WrongSetting(_Failure):
    exit_code = 2


class _Interrupted(_Failure):
    exit_code = INTERRUPTED


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


# Options carry the names of Config's fields; None leaves a setting to the environment. Config checks the values.
_JOB = _options(
    click.option("-n", "--workers", "num_workers", metavar="N", help="Workers in the job [DMLC_NUM_WORKER]."),
    click.option("-s", "--servers", "num_servers", metavar="N", help="Servers in the job [DMLC_NUM_SERVER]."),
)
_ROOT = _options(
    click.option("--root-uri", metavar="HOST", help="Where the scheduler is [DMLC_PS_ROOT_URI]."),
    click.option("--root-port", metavar="PORT", help="Its port [DMLC_PS_ROOT_PORT]."),
)
_LISTEN = _options(
    click.option("--host", "bind_host", metavar="HOST", help="Address to listen on [KVSTORE_BIND_HOST]."),
    click.option("--interface", metavar="NAME", help="Network interface to use [DMLC_INTERFACE]."),
)
_TUNING = _options(
    click.option("--insecure", is_flag=True, default=None, help="Listen beyond this machine [KVSTORE_INSECURE]."),
    click.option("--transport", metavar="auto|tcp|ipc", help="Between processes of one host [KVSTORE_TRANSPORT]."),
    click.option("--timeout", metavar="SECONDS", help="Deadline of every operation [KVSTORE_TIMEOUT]."),
    click.option("--log", metavar="LEVEL", help=f"{', '.join(_LEVELS)} [KVSTORE_LOG]."),
)
_IMPORTS = click.option(
    "--import", "imports", metavar="MODULE", multiple=True, help="Module with own optimizers or codecs; repeatable."
)


@click.group(cls=Commands, invoke_without_command=True, context_settings=SETTINGS)
@click.pass_context
def cli(ctx: click.Context) -> int:
    """Scheduler, servers and launcher of the key-value store.

    Without a command, the role is read from DMLC_ROLE (scheduler or server).
    """
    if ctx.invoked_subcommand is not None:
        return 0
    role = os.environ.get("DMLC_ROLE", "")
    if role in ("", Role.WORKER):
        click.echo(ctx.get_help(), err=True)
        return 2
    if role not in tuple(Role):
        allowed = ", ".join(Role)
        raise ParameterError(
            f"DMLC_ROLE is {role!r}; allowed are {allowed}", parameter="role", given=role, allowed=allowed
        )
    config = read_config()
    return _run_scheduler(config, None) if config.role is Role.SCHEDULER else _run_server(config, ())


@cli.command()
@_JOB
@_ROOT
@_LISTEN
@click.option("--port", metavar="PORT", help="The same as --root-port: where this scheduler listens; 0 for any.")
@_TUNING
@click.option("--ready-fd", type=int, hidden=True, help="Write the endpoint to this descriptor when listening.")
def scheduler(port: str | None, ready_fd: int | None, **settings: Any) -> int:
    """Run the scheduler: brings the job together, watches over it, ends with it."""
    settings["root_port"] = settings["root_port"] or port
    settings["root_uri"] = settings["root_uri"] or os.environ.get("DMLC_PS_ROOT_URI") or "127.0.0.1"
    return _run_scheduler(read_config(role=Role.SCHEDULER, **settings), ready_fd)


@cli.command()
@_JOB
@_ROOT
@_LISTEN
@click.option("--port", metavar="PORT|FIRST-LAST", help="Port to listen on, the first free one [KVSTORE_PORT].")
@_TUNING
@_IMPORTS
def server(imports: tuple[str, ...], **settings: Any) -> int:
    """Run one server: holds values, sums gradients, applies the optimizer."""
    return _run_server(read_config(role=Role.SERVER, **settings), imports)


@cli.command(context_settings={**SETTINGS, "allow_interspersed_args": False})
@click.option("-n", "--workers", type=int, required=True, help="How many workers run COMMAND.")
@click.option("-s", "--servers", type=int, default=1, show_default=True, help="How many servers.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of this machine the job uses.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the scheduler; default: any free one.")
@click.option("--interface", metavar="NAME", help="Network interface to use [DMLC_INTERFACE].")
@_TUNING
@_IMPORTS
@click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="Variable for all processes; repeatable.")
@click.option("--worker-env", multiple=True, metavar="NAME[=VALUE]", help="Variable for workers only.")
@click.option("--server-env", multiple=True, metavar="NAME[=VALUE]", help="Variable for servers only.")
@click.option(
    "--grace", type=click.FloatRange(0), default=5.0, show_default=True,
    help="Seconds the others get to end after one failed or a signal came.",
)  # fmt: skip
@click.option("--no-prefix", is_flag=True, help="Do not name the writer of every line of output.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def launch(**options: Any) -> int:
    """Run a whole job on this machine: a scheduler, servers, and workers that run COMMAND.

    \b
    kvstore-server launch -n 4 -s 2 -- python train.py

    Ends with the exit code of the first process that failed; leaves nothing running.
    """
    from kvstore.server.launch_plan import OWN, Plan, variables
    from kvstore.server.launcher import launch as run

    given = {name: options[name] for name in ("interface", "insecure", "transport", "timeout", "log")}
    settings = {ENVIRONMENT[name]: _text(value) for name, value in given.items() if value is not None}
    env = {**settings, **variables(options["env"], os.environ)}
    own = {name: value for name, value in {**os.environ, **env}.items() if name not in OWN}
    config = read_config(own, required=())  # wrong settings are told before anything runs
    _set_up_log(config)
    plan = Plan(
        command=options["command"], workers=options["workers"], servers=options["servers"],
        host=options["host"], port=options["port"], imports=options["imports"],
        env=env,
        worker_env=variables(options["worker_env"], os.environ),
        server_env=variables(options["server_env"], os.environ),
        grace=options["grace"], notice=config.dead_after + 2 * config.heartbeat, prefixed=not options["no_prefix"],
    )  # fmt: skip
    return run(plan)


@cli.command()
@_ROOT
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True, help="Seconds.")
@click.option("--keys", is_flag=True, help="List every key.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status(timeout: float, keys: bool, as_json: bool, **root: Any) -> int:
    """Show who is in a running job and what its servers hold."""
    from kvstore.server.report import print_status, status_json
    from kvstore.server.status import ask_job

    job = ask_job(_client_config(root), timeout, keys=keys)
    if as_json:
        click.echo(status_json(job))
    else:
        print_status(job, keys=keys)
    return any(isinstance(answer, KVStoreError) for answer in job.servers.values())


@cli.command()
@_ROOT
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True, help="Seconds.")
def check(timeout: float, **root: Any) -> int:
    """Find out why a job does not come together: try to reach every process of it."""
    from kvstore.server.report import print_findings
    from kvstore.server.status import check_job

    findings = check_job(_client_config(root), timeout)
    print_findings(findings)
    return not all(finding.ok for finding in findings)


@cli.command()
@_IMPORTS
def codecs(imports: tuple[str, ...]) -> int:
    """List the codecs with their parameters."""
    from kvstore.compression.registry import describe
    from kvstore.server.node import import_modules
    from kvstore.server.report import print_codecs

    import_modules(imports)
    print_codecs(describe())
    return 0


@cli.command("bench-codec")
@click.option(
    "--array", type=click.Path(dir_okay=False, path_type=Path), help="Gradient to measure with, an .npy file."
)
@click.option("--model", type=click.Choice(["resnet50"]), help="Stand-ins with a model's shapes [default: resnet50].")
@click.option("--bandwidth", default="1gbit", show_default=True, help="Of a worker's connection, such as 100mbit, 1GB.")
@click.option("--codec", "chosen", metavar="TYPE[,NAME=VALUE...]", multiple=True, help="Only these; repeatable.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="The fastest run counts.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@_IMPORTS
def bench_codec(array: Path | None, bandwidth: str, chosen: tuple[str, ...], **options: Any) -> int:
    """Measure the codecs on an array, and predict the time of a round at a bandwidth, best first."""
    from kvstore.server import bench_codec as bench
    from kvstore.server.bench_report import bench_json, print_bench
    from kvstore.server.node import import_modules

    import_modules(options["imports"])
    if array is not None and options["model"] is not None:
        raise ParameterError("give --array or --model, not both", parameter="array", given=str(array), allowed="one")
    speed = bench.parse_bandwidth(bandwidth)
    params = [bench.parse_codec("none"), *(bench.parse_codec(text) for text in chosen)] if chosen else None
    arrays = bench.read_array(array) if array is not None else bench.resnet50()
    figures = bench.measure_all(arrays, params or bench.default_codecs(), options["repeats"])
    click.echo(bench_json(figures, speed)) if options["as_json"] else print_bench(figures, speed, bandwidth)
    return 0


@cli.command()
@click.option("--data", type=click.Choice(["digits", "fashion-mnist"]), default="digits", show_default=True)
@click.option("--epochs", type=click.IntRange(1), help="Passes over the images; default: what suits the data.")
@click.option("-n", "--workers", type=click.IntRange(1), default=2, show_default=True)
@click.option("-s", "--servers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--threshold", type=float, help="Of the 2-bit compression; default: what suits the data.")
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), default="demo-results", show_default=True,
    help="Folder for figure and results.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of weights, order and split.")
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Train so often; show the means.")
def demo(**options: Any) -> int:
    """Train a small classifier over a real job on this machine, raw and with 2-bit compression, and compare.

    Shows test accuracy, bytes and seconds, and draws a figure. Fails if the accuracies differ by 2 points or more.
    Needs the extra: pip install 'gradkv[demo]'.
    """
    from kvstore.server.demo import run_demo

    return run_demo(**options)


def _run_scheduler(config: Config, ready_fd: int | None) -> int:
    from kvstore.server.scheduler import run_scheduler

    def ready(endpoint: str) -> None:
        if ready_fd is None:
            click.echo(f"scheduler listens at {endpoint}")
            return
        try:
            with os.fdopen(ready_fd, "wb") as told:
                told.write(f"{endpoint}\n".encode())
        except OSError as error:
            raise ConfigError(f"--ready-fd {ready_fd}: {error.strerror}") from error

    _set_up_log(config)
    return run_scheduler(config, ready=ready)


def _run_server(config: Config, imports: tuple[str, ...]) -> int:
    from kvstore.server.node import run_server

    _set_up_log(config)
    return run_server(config, imports=imports)


def _client_config(root: dict[str, Any]) -> Config:
    # A tool outside the job: of the environment it needs only where the scheduler is, and how to connect.
    names = (*(name for name in REQUIRED if name.startswith("root")), "transport", "log")
    environment = {ENVIRONMENT[name]: os.environ.get(ENVIRONMENT[name], "") for name in names}
    config = read_config(environment, required=("root_uri", "root_port"), num_workers=1, num_servers=1, **root)
    _set_up_log(config)
    return config


def _set_up_log(config: Config) -> None:
    level = config.log.lower()
    if level not in _LEVELS:
        raise ParameterError(
            f"KVSTORE_LOG (setting 'log') is {config.log!r}; allowed are {', '.join(_LEVELS)}",
            parameter="log", given=config.log, allowed=", ".join(_LEVELS),
        )  # fmt: skip
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def main() -> None:
    """Entry point of the command."""
    try:
        cli(prog_name="kvstore-server")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
