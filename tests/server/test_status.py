"""Asking processes for their status, and finding out why one does not answer: real sockets, stand-in processes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import pytest

from kvstore.config import Config
from kvstore.errors import AddressError, KVStoreError, OperationTimeoutError, ProtocolError
from kvstore.messages import AskStatus, Failed, Failure, KeyStatus, Message, ProcessStatus, Role, Status
from kvstore.server.status import Finding, ask_job, ask_status, check_job, within
from kvstore.wire import Wire
from kvstore.zmq_transport import ZmqTransport

KEY = KeyStatus("w", 1, 1000, 5, 20000, 1250)
Answer: TypeAlias = Callable[[AskStatus], Message]


@contextmanager
def process(answer: Answer) -> Iterator[str]:
    """A process that answers AskStatus; yields its endpoint."""
    transport, wire, over = ZmqTransport(Config()), Wire("job-1"), threading.Event()
    endpoint = transport.bind("tcp://127.0.0.1:0")

    def serve() -> None:
        while not over.is_set():
            for sender, frames in transport.receive(10.0):
                message, _ = wire.decode(frames)
                assert isinstance(message, AskStatus)
                transport.send(sender, wire.encode(answer(message)))
        transport.close(flush=1.0)

    thread = threading.Thread(target=serve)
    thread.start()
    yield endpoint
    over.set()
    transport.wake()
    thread.join()


def server_status(rank: int = 0, job: str = "job-1", role: Role = Role.SERVER) -> Answer:
    def answer(asked: AskStatus) -> Status:
        return Status(
            sequence=asked.sequence, role=role, rank=rank, job=job, num_workers=1, num_servers=1,
            keys=[KEY] if asked.keys else [], totals={"keys": 1, "raw_bytes": 20000, "received_bytes": 1250},
        )  # fmt: skip

    return answer


def scheduler_status(processes: Sequence[ProcessStatus], servers: int = 1, workers: int = 1) -> Answer:
    def answer(asked: AskStatus) -> Status:
        return Status(
            sequence=asked.sequence, role=Role.SCHEDULER, rank=0, job="job-1",
            num_workers=workers, num_servers=servers, processes=list(processes),
        )  # fmt: skip

    return answer


def member(role: Role, rank: int, endpoint: str = "", state: str = "active") -> ProcessStatus:
    return ProcessStatus(role, rank, state, 0.5, endpoint, "here", 4711)


@pytest.fixture
def dead() -> Iterator[str]:
    """An endpoint that is taken, where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(autouse=True)
def no_name_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of the domain 'invalid' do not resolve, and at once; the machine's own name service may take its time."""
    resolve = socket.getaddrinfo

    def getaddrinfo(host: str, *arguments: Any, **options: Any) -> Any:
        if host.endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.fixture
def mute() -> Iterator[str]:
    """An endpoint that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def config(endpoint: str) -> Config:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return Config(root_uri=host, root_port=int(port), num_workers=1, num_servers=1)


# --- asking -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [False, True])
def test_ask_status(keys: bool) -> None:
    with process(server_status(rank=3)) as endpoint:
        status = ask_status(endpoint, 30.0, keys=keys)
    assert (status.role, status.rank, status.job) == (Role.SERVER, 3, "job-1")
    assert status.keys == ([KEY] if keys else [])


def test_ask_ignores_answers_to_other_questions() -> None:
    answered: list[int] = []

    def answer(asked: AskStatus) -> Message:
        answered.append(asked.sequence)
        return server_status()(AskStatus(sequence=asked.sequence + 1))

    with process(answer) as endpoint, pytest.raises(OperationTimeoutError):
        ask_status(endpoint, 1.0)
    assert answered


def test_ask_nobody(dead: str) -> None:
    began = time.monotonic()
    with pytest.raises(OperationTimeoutError, match=f"no answer from {dead} within 0.2 s") as raised:
        ask_status(dead, 0.2)
    assert raised.value.address == dead
    assert time.monotonic() - began < 10.0


def test_failure_of_the_asked_is_raised() -> None:
    refused = Failed(failure=Failure("ProtocolError", "protocol version 1 is not 2", {}))
    with process(lambda _: refused) as endpoint, pytest.raises(ProtocolError, match="version 1 is not 2"):
        ask_status(endpoint, 30.0)


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://no-such-host.invalid:1"])
def test_ask_bad_address(endpoint: str) -> None:
    with pytest.raises(AddressError):
        ask_status(endpoint, 30.0)


def test_ask_job_asks_all_servers_at_once(mute: str) -> None:
    """Each of two servers answers once the other was asked too; others never do."""
    both = threading.Barrier(2)

    def answer_together(rank: int) -> Answer:
        def answer(asked: AskStatus) -> Message:
            both.wait(30)
            return server_status(rank)(asked)

        return answer

    with process(answer_together(0)) as first, process(answer_together(1)) as second:
        members = [
            member(Role.SERVER, 0, first),
            member(Role.SERVER, 1, second),
            member(Role.SERVER, 2, mute),
            member(Role.SERVER, 3, mute),
            member(Role.SERVER, 4, mute, "left"),
            member(Role.WORKER, 0),
        ]
        with process(scheduler_status(members, servers=5)) as endpoint:
            job = ask_job(config(endpoint), 3.0, keys=True)
    assert job.scheduler.processes == members
    assert sorted(job.servers) == [0, 1, 2, 3]
    for rank in (0, 1):
        answer = job.servers[rank]
        assert isinstance(answer, Status) and answer.rank == rank and answer.keys == [KEY]
    assert isinstance(job.servers[2], OperationTimeoutError) and isinstance(job.servers[3], KVStoreError)


# --- checking ---------------------------------------------------------------------------------------------------------


def only_failure(findings: Sequence[Finding]) -> Finding:
    (failure,) = (finding for finding in findings if not finding.ok)
    assert failure.hint, "a failure says what to do"
    return failure


def test_check_of_a_whole_job() -> None:
    with process(server_status()) as server:
        members = [member(Role.WORKER, 0), member(Role.SERVER, 0, server)]
        with process(scheduler_status(members)) as endpoint:
            findings = check_job(config(endpoint), 30.0)
    assert [(finding.role, finding.rank, finding.ok) for finding in findings] == [
        (Role.SCHEDULER, 0, True),
        (Role.SERVER, 0, True),
        (Role.WORKER, 0, True),
    ]
    assert "job-1" in findings[0].text


def test_check_names_the_closed_port(dead: str) -> None:
    failure = only_failure(check_job(config(dead), 30.0))
    assert failure.role is Role.SCHEDULER
    assert f"nothing listens at {dead}" in failure.text and "DMLC_PS_ROOT_PORT" in failure.text


def test_check_names_the_unknown_host() -> None:
    failure = only_failure(check_job(config("tcp://no-such-host.invalid:4711"), 30.0))
    assert "no-such-host.invalid" in failure.text and "resolve" in failure.text


def test_check_notices_silence(mute: str) -> None:
    began = time.monotonic()
    failure = only_failure(check_job(config(mute), 2.0))
    assert f"{mute} takes connections but does not answer" in failure.text
    assert time.monotonic() - began < 15.0


def test_check_is_bounded_though_name_resolution_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr("kvstore.server.status.scheduler_endpoint", lambda _: str(released.wait()))
    failure = only_failure(check_job(config("tcp://127.0.0.1:1"), 0.2))
    assert "no answer in time" in failure.text
    released.set()


def test_check_is_told_the_address_of_a_server() -> None:
    with process(server_status(rank=2)) as endpoint:
        failure = only_failure(check_job(config(endpoint), 30.0))
    assert "is server 2 of job 'job-1'" in failure.text


@pytest.mark.parametrize("fault", ["dead", "mute", "unknown host", "another job", "lost", "missing", "worker lost"])
def test_check_finds_the_one_that_is_not_well(fault: str, dead: str, mute: str) -> None:
    server, worker = Role.SERVER, Role.WORKER
    with ExitStack() as stack:
        good = stack.enter_context(process(server_status()))
        other = stack.enter_context(process(server_status(job="job-0")))
        members, who, text = {
            "dead": ([member(server, 1, dead)], (server, 1), f"nothing listens at {dead}"),
            "mute": ([member(server, 1, mute)], (server, 1), "does not answer"),
            "unknown host": ([member(server, 1, "tcp://no-such.invalid:1")], (server, 1), "no-such.invalid"),
            "another job": ([member(server, 1, other)], (server, 1), "of another job, 'job-0'"),
            "lost": ([member(server, 1, good, "lost")], (server, 1), "lost: pid 4711 on here"),
            "missing": ([], (server, 1), "has not registered"),
            "worker lost": ([member(server, 1, good), member(worker, 0, "", "lost")], (worker, 0), "lost"),
        }[fault]
        members = [member(server, 0, good), *members]
        if fault != "worker lost":
            members.append(member(worker, 0))
        endpoint = stack.enter_context(process(scheduler_status(members, servers=2)))
        failure = only_failure(check_job(config(endpoint), 3.0 if fault == "mute" else 30.0))
    assert (failure.role, failure.rank) == who
    assert text in failure.text


def test_within_keeps_the_order_and_the_deadline() -> None:
    released = threading.Event()
    assert within(1.0, [lambda: 1, lambda: int(released.wait()), lambda: 3]) == [1, None, 3]
    released.set()
