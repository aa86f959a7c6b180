"""The scheduler as a process of its own, over real sockets. Started as a program, this file is one of its workers."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.config import Config
from kvstore.errors import AddressError, JoinError, PeerLostError
from kvstore.loop import Loop
from kvstore.machine import SCHEDULER, Action, Send
from kvstore.member import Member, MemberState
from kvstore.messages import AskStatus, Exited, Frame, Message, Role, Status
from kvstore.server.scheduler import run_scheduler
from kvstore.wire import Wire
from kvstore.zmq_transport import ZmqTransport

DEADLINE = 60.0
"""Seconds after which a test gives up; nothing here takes a quarter of it."""


def config(port: int, **changes: object) -> Config:
    fields: dict[str, object] = {
        "root_uri": "127.0.0.1", "root_port": port, "num_workers": 1, "num_servers": 1,
        "heartbeat": 0.2, "dead_after": 2.0, "timeout": 40.0, "retry": 0.5, "job": "test-job",
    }  # fmt: skip
    return Config(**{**fields, **changes})  # type: ignore[arg-type]


class Participant:
    """A member alone in its process."""

    def __init__(self, settings: Config, role: Role) -> None:
        endpoint = "tcp://127.0.0.1:1" if role is Role.SERVER else ""
        self.member = Member(settings, role, endpoint=endpoint, pid=os.getpid(), host="here")
        self.answers: list[Message] = []
        self.transport = ZmqTransport(settings)
        self.loop = Loop(self, self.transport, Wire(), tick_every=0.05)
        self.loop.perform(self.member.start(time.monotonic()))

    @property
    def finished(self) -> bool:
        return self.member.state in (MemberState.LEFT, MemberState.FAILED)

    def receive(self, sender: str, message: Message, frames: Sequence[Frame], now: float) -> Iterable[Action]:
        if self.member.concerns(message):
            return self.member.receive(message, now)
        self.answers.append(message)
        return []

    def unreachable(self, to: str, now: float) -> Iterable[Action]:
        return []

    def tick(self, now: float) -> Iterable[Action]:
        return self.member.tick(now)


@pytest.fixture
def participants() -> Iterator[list[Participant]]:
    """What is put in here is closed at the end."""
    made: list[Participant] = []
    yield made
    for participant in made:
        participant.transport.close()


@pytest.fixture
def programs() -> Iterator[list[subprocess.Popen[str]]]:
    """What is put in here is killed at the end."""
    made: list[subprocess.Popen[str]] = []
    yield made
    for program in made:
        program.kill()
        program.communicate()


def start(programs: list[subprocess.Popen[str]], *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__)), *map(str, arguments)]
    programs.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    return programs[-1]


def read_line(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def start_scheduler(programs: list[subprocess.Popen[str]], workers: int) -> tuple[subprocess.Popen[str], int]:
    program = start(programs, "scheduler", 0, workers)
    endpoint = read_line(program)
    assert endpoint.startswith("tcp://127.0.0.1:")
    return program, int(endpoint.rpartition(":")[2])


def run_until(participants: list[Participant], predicate: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not predicate():
        assert time.monotonic() < end, [one.member.waiting_text or one.member.state for one in participants]
        for participant in participants:
            participant.loop.step(0.02)


def join(participants: list[Participant], port: int, workers: int, *roles: Role) -> list[Member]:
    participants += [Participant(config(port, num_workers=workers), role) for role in roles]
    return [participant.member for participant in participants]


def test_job_from_start_to_end(programs: list[subprocess.Popen[str]], participants: list[Participant]) -> None:
    scheduler, port = start_scheduler(programs, 1)
    members = join(participants, port, 1, Role.WORKER, Role.SERVER)
    run_until(participants, lambda: all(member.state is MemberState.ACTIVE for member in members))
    assert members[0].servers == ["tcp://127.0.0.1:1"]
    participants[0].loop.perform([Send(SCHEDULER, AskStatus(sequence=7))])
    run_until(participants, lambda: bool(participants[0].answers))
    (status,) = participants[0].answers
    assert isinstance(status, Status)
    assert sorted((one.role.value, one.state, one.pid) for one in status.processes) == [
        (role, "active", os.getpid()) for role in ("server", "worker")
    ]
    for participant in participants:
        participant.loop.perform(participant.member.leave(1, time.monotonic()))
    run_until(participants, lambda: all(member.state is MemberState.LEFT for member in members))
    assert scheduler.wait(DEADLINE) == 0


def test_signal_ends_it_and_everybody_is_told(
    programs: list[subprocess.Popen[str]], participants: list[Participant]
) -> None:
    scheduler, port = start_scheduler(programs, 1)
    members = join(participants, port, 1, Role.WORKER, Role.SERVER)
    run_until(participants, lambda: all(member.state is MemberState.ACTIVE for member in members))
    scheduler.send_signal(signal.SIGTERM)
    run_until(participants, lambda: all(member.state is MemberState.FAILED for member in members))
    for member in members:
        assert isinstance(member.error, PeerLostError)
        assert (member.error.role, member.error.rank) == ("scheduler", 0)
        assert "ended by SIGTERM" in member.error.text
    assert scheduler.wait(DEADLINE) == 128 + signal.SIGTERM


def test_stopped_worker_is_lost_and_told_when_it_wakes(
    programs: list[subprocess.Popen[str]], participants: list[Participant]
) -> None:
    _, port = start_scheduler(programs, 2)
    victim = start(programs, "worker", port, 2)
    members = join(participants, port, 2, Role.WORKER, Role.SERVER)
    run_until(participants, lambda: all(member.state is MemberState.ACTIVE for member in members))
    rank = int(read_line(victim))
    victim.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    run_until(participants, lambda: all(member.num_dead(Role.WORKER) == 1 for member in members))
    assert time.monotonic() - stopped < 15.0  # dead_after is 2 s; the exact bound is shown on simulated time
    gone = members[0].gone[Role.WORKER, rank]
    assert gone.lost
    assert gone.age >= 2.0
    victim.send_signal(signal.SIGCONT)
    assert "you were removed from the job" in read_line(victim)


def test_worker_that_holds_pythons_lock_is_not_lost(
    programs: list[subprocess.Popen[str]], participants: list[Participant]
) -> None:
    _, port = start_scheduler(programs, 2)
    busy = start(programs, "busy", port, 2)
    members = join(participants, port, 2, Role.WORKER, Role.SERVER)
    run_until(participants, lambda: all(member.state is MemberState.ACTIVE for member in members))
    read_line(busy)  # from here on it holds the lock for twice dead_after
    began = time.monotonic()
    run_until(participants, lambda: time.monotonic() - began > 4.5 or bool(members[0].gone))
    assert members[0].gone == {}
    assert read_line(busy) == "active"


def test_launcher_report_reaches_everybody(
    programs: list[subprocess.Popen[str]], participants: list[Participant]
) -> None:
    _, port = start_scheduler(programs, 1)
    members = join(participants, port, 1, Role.WORKER, Role.SERVER)
    run_until(participants, lambda: all(member.state is MemberState.ACTIVE for member in members))
    participants[0].loop.perform([Send(SCHEDULER, Exited(role=Role.SERVER, rank=0, code=-9))])
    run_until(participants, lambda: members[0].num_dead() == 1 and members[1].error is not None)
    assert members[0].gone[Role.SERVER, 0].exit_code == -9


def test_nobody_listens(participants: list[Participant]) -> None:
    participants.append(Participant(config(1, timeout=0.5), Role.WORKER))
    run_until(participants, lambda: participants[0].finished)
    error = participants[0].member.error
    assert isinstance(error, JoinError)
    assert "nothing answered at tcp://127.0.0.1:1" in error.text


def test_address_in_use_is_named(programs: list[subprocess.Popen[str]]) -> None:
    _, port = start_scheduler(programs, 1)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(AddressError, match=f"127.0.0.1:{port}"):
        run_scheduler(config(port, role=Role.SCHEDULER))
    assert signal.getsignal(signal.SIGTERM) is handler


def main(kind: str, port: int, workers: int) -> int:
    """`scheduler`: tells its endpoint. `worker`, `busy`: tell their rank, and at the end what became of them."""
    if kind == "scheduler":
        return run_scheduler(config(port, num_workers=workers, role=Role.SCHEDULER), ready=say)
    one = Participant(config(port, num_workers=workers), Role.WORKER)
    run_until([one], lambda: one.member.rank is not None)
    say(str(one.member.rank))
    if kind == "busy":
        ctypes.PyDLL(None).usleep(4_000_000)  # PyDLL: keeps the lock during the call
        began = time.monotonic()
        run_until([one], lambda: time.monotonic() - began > 0.5)
        say(one.member.state)
    run_until([one], lambda: one.finished)
    say(str(one.member.error))
    return 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
