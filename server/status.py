"""Asks the processes of a job what they do, and finds out why one does not answer."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore.addresses import choose_endpoint, scheduler_endpoint, split_tcp
from kvstore.config import ENVIRONMENT, Config
from kvstore.errors import AddressError, KVStoreError, OperationTimeoutError, from_wire
from kvstore.messages import AskStatus, Failed, Frame, ProcessStatus, Role, Status
from kvstore.server.output import name
from kvstore.wire import Wire

T = TypeVar("T")
LIVE = ("joining", "active")
"""States of a process that should answer."""

_PEER = "peer"
_SEQUENCE = 1


@dataclass(frozen=True)
class JobStatus:
    """What the scheduler says, and each server by rank: its answer, or why there is none."""

    scheduler: Status
    servers: dict[int, Status | KVStoreError]


@dataclass(frozen=True)
class Finding:
    """What a check found out about one process. `hint` says what to do if it is not `ok`."""

    role: Role
    rank: int
    ok: bool
    text: str
    hint: str = ""


def ask_status(endpoint: str, timeout: float = 5.0, *, keys: bool = False, config: Config | None = None) -> Status:
    """Ask a scheduler or server what it does; needs no job id.

    Args:
        endpoint: as the process advertises it, 'tcp://HOST:PORT' or with an ipc path.
        timeout: seconds.
        keys: ask for every key of a server, not only for totals.
        config: limits and transport to use; the defaults if None.

    Raises:
        OperationTimeoutError: no answer in time.
        AddressError: the endpoint is malformed or does not resolve.
        ProtocolError: the answer cannot be read.
        KVStoreError: whatever the process answered instead.
    """
    from kvstore.zmq_transport import ZmqTransport

    config = config or Config()
    wire = Wire(limits=config.limits)
    deadline = time.monotonic() + timeout
    transport = ZmqTransport(config)
    try:
        transport.connect(_PEER, endpoint)
        transport.send(_PEER, wire.encode(AskStatus(sequence=_SEQUENCE, keys=keys)))
        while (left := deadline - time.monotonic()) > 0:
            for _, frames in transport.receive(left):
                if (status := _read(wire, frames)) is not None:
                    return status
    finally:
        transport.close()
    raise OperationTimeoutError(
        f"no answer from {endpoint} within {timeout:g} s; kvstore-server check says more", address=endpoint
    )


def ask_job(config: Config, timeout: float = 5.0, *, keys: bool = False) -> JobStatus:
    """Ask the scheduler at `config.root_uri`, then all servers that it lists, at once.

    Raises:
        KVStoreError: as `ask_status`, for the scheduler. What goes wrong with a server is part of the answer.
    """
    deadline = time.monotonic() + timeout
    scheduler = ask_status(scheduler_endpoint(config), timeout, config=config)
    listed = [process for process in scheduler.processes if process.role is Role.SERVER and process.state in LIVE]

    def ask(process: ProcessStatus) -> Status | KVStoreError:
        try:
            return ask_status(process.endpoint, max(deadline - time.monotonic(), 0.5), keys=keys, config=config)
        except KVStoreError as error:
            return error

    answers = within(max(deadline - time.monotonic(), 0.5) + 0.5, [lambda p=p: ask(p) for p in listed])  # type: ignore[misc]
    late = OperationTimeoutError(f"no answer within {timeout:g} s")
    return JobStatus(scheduler, {p.rank: answer or late for p, answer in zip(listed, answers, strict=True)})


def check_job(config: Config, timeout: float = 5.0) -> list[Finding]:
    """Reach the scheduler and every process that should be in its job; one finding each, within `timeout` seconds."""
    end = time.monotonic() + timeout
    deadline = end - timeout / 10  # what hears of its deadline itself can say more than that it is late
    where = f"{ENVIRONMENT['root_uri']} {config.root_uri!r}, {ENVIRONMENT['root_port']} {config.root_port}"
    (found,) = within(timeout, [lambda: _reach(lambda: scheduler_endpoint(config), deadline, config)])
    if not isinstance(found, Status):
        text, hint = found or _HANGING
        return [Finding(Role.SCHEDULER, 0, False, f"{text} ({where})", hint)]
    if found.role is not Role.SCHEDULER:
        text = f"{config.root_uri}:{config.root_port} is {name(found.role, found.rank)} of job {found.job!r}"
        return [Finding(Role.SCHEDULER, 0, False, text, f"set {where} to where the scheduler listens")]
    scheduler = Finding(Role.SCHEDULER, 0, True, f"answers; job {found.job!r}")
    calls: list[Callable[[], Finding]] = [
        lambda process=process: _check_process(process, found, deadline, config)  # type: ignore[misc]
        for process in found.processes
    ]
    findings = [
        finding or Finding(process.role, process.rank, False, *_HANGING)
        for process, finding in zip(found.processes, within(end - time.monotonic(), calls), strict=True)
    ]
    return [scheduler, *sorted([*findings, *_missing(found)], key=lambda finding: (finding.role, finding.rank))]


def within(seconds: float, calls: Sequence[Callable[[], T]]) -> list[T | None]:
    """Run all calls at once; return their results, None for one that is not done in time.

    Name resolution cannot be given a deadline; a thread that hangs in it is left behind and ends with the process.
    """
    results: list[T | None] = [None] * len(calls)

    def run(position: int, call: Callable[[], T]) -> None:
        results[position] = call()

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(calls)]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(results)


_HANGING = "no answer in time", "the name server or the network does not answer; try an address instead of a name"


def _read(wire: Wire, frames: Sequence[Frame]) -> Status | None:
    message, _ = wire.decode(frames)
    match message:
        case Status(sequence=sequence) if sequence == _SEQUENCE:
            return message
        case Failed(failure=failure):
            raise from_wire(failure.error, failure.text, failure.facts)
    return None


def _reach(find: Callable[[], str], deadline: float, config: Config) -> Status | tuple[str, str]:
    """Resolve, connect, ask: the answer, or (what went wrong, what to do)."""
    try:
        endpoint = choose_endpoint(find(), config)
    except AddressError as error:
        return str(error).removeprefix(
            f"{config.role}: "
        ), "use an address that this machine knows, or add the name to its name service"
    if trouble := _connect(endpoint, deadline):
        return trouble
    try:
        return ask_status(endpoint, max(deadline - time.monotonic(), 0.1), config=config)
    except OperationTimeoutError:
        hint = "is it another program that listens there, or is the process stopped or overloaded?"
        return f"{endpoint} takes connections but does not answer", hint
    except KVStoreError as error:
        return f"{endpoint} answers with an error: {error}", "run the same release of gradkv everywhere"


def _connect(endpoint: str, deadline: float) -> tuple[str, str] | None:
    """Open and close a plain connection, because ZeroMQ itself never says why one fails."""
    left = max(deadline - time.monotonic(), 0.1) * 0.8  # some time must remain for the answer
    try:
        if endpoint.startswith("ipc://"):
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as unix:
                unix.settimeout(left)
                unix.connect(endpoint.removeprefix("ipc://"))
        else:
            host, port = split_tcp(endpoint)
            socket.create_connection((host, int(port)), left).close()
    except ConnectionRefusedError:
        return f"nothing listens at {endpoint}", "is the process running, and is this its port?"
    except TimeoutError:
        return f"{endpoint} does not take connections in time", "wrong address, host down, or a firewall in between?"
    except OSError as error:
        return f"cannot connect to {endpoint}: {error.strerror or error}", "is this address reachable from here?"
    return None


def _check_process(process: ProcessStatus, job: Status, deadline: float, config: Config) -> Finding:
    def finding(ok: bool, text: str, hint: str = "") -> Finding:
        return Finding(process.role, process.rank, ok, text, hint)

    where = f"pid {process.pid} on {process.host or 'an unknown host'}, heard of {process.age:.1f} s ago"
    if process.state not in LIVE:
        lost = process.state == "lost"
        return finding(not lost, f"{process.state}: {where}", "see its log; the job has to be started again" * lost)
    if process.role is Role.WORKER:
        return finding(True, f"{process.state}: {where}")
    answer = _reach(lambda: process.endpoint, deadline, config)
    if not isinstance(answer, Status):
        return finding(False, f"{answer[0]} ({where})", answer[1])
    if (answer.role, answer.job) != (process.role, job.job) and answer.job:
        other = f"{process.endpoint} is {name(answer.role, answer.rank)} of another job, {answer.job!r}"
        return finding(False, other, "a left-over process holds the port of this server: end it")
    return finding(True, f"{process.state}, answers: {where}")


def _missing(job: Status) -> list[Finding]:
    known = {(process.role, process.rank) for process in job.processes}
    expected = [(Role.SERVER, rank) for rank in range(job.num_servers)]
    expected += [(Role.WORKER, rank) for rank in range(job.num_workers)]
    hint = "is it running, and does it have the same {} and {}?".format(
        ENVIRONMENT["root_uri"], ENVIRONMENT["root_port"]
    )
    return [
        Finding(role, rank, False, "has not registered at the scheduler", hint)
        for role, rank in expected
        if (role, rank) not in known
    ]
