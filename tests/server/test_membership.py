"""The scheduler's machine: tables of events and what they lead to. Times are plain numbers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvstore.config import Config
from kvstore.errors import ProtocolError
from kvstore.machine import Action, Send
from kvstore.messages import (
    Ack,
    Agree,
    AskStatus,
    Barrier,
    Beat,
    Exited,
    Failed,
    Gone,
    Leave,
    Message,
    Probe,
    ProcessStatus,
    Register,
    Role,
    Roster,
    Start,
    Status,
    Waiting,
)
from kvstore.server.membership import LINGER, Membership

CONFIG = Config(num_workers=2, num_servers=1, heartbeat=1.0, dead_after=5.0)
SERVERS = ["tcp://h:4000"]


def register(role: Role, rank: int | None = None, **changes: object) -> Register:
    fields: dict[str, object] = {
        "num_workers": 2, "num_servers": 1, "chunk_elements": 262_144, "pid": 7, "host": "a",
        "endpoint": SERVERS[0] if role is Role.SERVER else "",
    }  # fmt: skip
    return Register(role=role, rank=rank, **{**fields, **changes})  # type: ignore[arg-type]


WORKER, SERVER = register(Role.WORKER), register(Role.SERVER)


class Driver:
    """Feeds a machine, checks it after every step, and returns sends as (to, message)."""

    def __init__(self) -> None:
        self.machine = Membership(CONFIG, "j1")

    def _sends(self, actions: Iterable[Action]) -> list[tuple[str, Message]]:
        sends = [(action.to, action.message) for action in actions if isinstance(action, Send)]
        self.machine.validate()
        return sends

    def receive(self, sender: str, message: Message, now: float) -> list[tuple[str, Message]]:
        return self._sends(self.machine.receive(sender, message, (), now))

    def tick(self, now: float) -> list[tuple[str, Message]]:
        return self._sends(self.machine.tick(now))

    def unreachable(self, to: str, now: float) -> list[tuple[str, Message]]:
        return self._sends(self.machine.unreachable(to, now))

    def failure(self, sender: str, message: Message, now: float) -> tuple[str, str]:
        ((to, answer),) = self.receive(sender, message, now)
        assert to == sender
        assert isinstance(answer, Failed)
        return answer.failure.error, answer.failure.text

    def keep_alive(self, *nodes: str, until: float, start: float = 1.0) -> list[tuple[str, Message]]:
        """Let the nodes beat every second; return what the ticks sent."""
        sent = []
        for second in range(int(start), int(until) + 1):
            for node in nodes:
                self.receive(node, Beat(), float(second))
            sent += self.tick(float(second))
        return sent


@pytest.fixture
def started() -> Driver:
    """Workers 'w0', 'w1' and server 's0', all started at time 0."""
    driver = Driver()
    driver.receive("w0", WORKER, 0.0)
    driver.receive("s0", SERVER, 0.0)
    driver.receive("w1", WORKER, 0.0)
    return driver


def start(rank: int) -> Start:
    return Start(job="j1", rank=rank, servers=SERVERS)


def test_start_when_complete() -> None:
    driver = Driver()
    assert driver.receive("w0", WORKER, 0.0) == []
    assert driver.receive("s0", SERVER, 0.0) == []
    assert driver.receive("w0", WORKER, 0.1) == []  # again: changes nothing
    assert not driver.machine.started
    assert driver.receive("w1", WORKER, 0.2) == [("w0", start(0)), ("s0", start(0)), ("w1", start(1))]
    assert driver.receive("w1", WORKER, 0.3) == [("w1", start(1))]  # its Start was lost
    assert driver.tick(10.0) == [("w0", Probe()), ("s0", Probe()), ("w1", Probe())]  # and no Waiting


def test_wanted_ranks_are_honoured_whatever_the_order() -> None:
    driver = Driver()
    driver.receive("b", register(Role.WORKER, 1), 0.0)
    driver.receive("s", register(Role.SERVER, 0), 0.0)
    assert driver.receive("a", register(Role.WORKER, 0), 0.0) == [("b", start(1)), ("s", start(0)), ("a", start(0))]


def test_joiners_are_told_on_change_and_every_two_seconds() -> None:
    driver = Driver()
    driver.receive("w0", WORKER, 0.0)
    one = Waiting(text="0 of 1 servers and 1 of 2 workers registered; missing: server 0; worker 1")
    two = Waiting(text="1 of 2 workers registered; missing: worker 1")
    table: list[tuple[float, Message | None, list[tuple[str, Message]]]] = [
        (0.25, None, [("w0", one)]),
        (0.5, None, []),
        (1.0, SERVER, []),
        (1.25, None, [("w0", two), ("s0", two)]),
        (3.0, None, []),
        (3.25, None, [("w0", two), ("s0", two)]),
    ]
    for now, message, expected in table:
        for process in driver.machine.processes.values():
            process.hear(now)
        assert (driver.tick(now) if message is None else driver.receive("s0", message, now)) == expected, now


@pytest.mark.parametrize(
    ("message", "kind", "part"),
    [
        (register(Role.WORKER, 1), "JoinError", "worker 1 (host a, pid 7) already has"),
        (register(Role.WORKER, num_workers=3), "MismatchError", "DMLC_NUM_WORKER=3, the scheduler with"),
        (register(Role.SERVER), "JoinError", "one too many"),
    ],
)
def test_refused_while_joining_and_the_others_still_start(message: Register, kind: str, part: str) -> None:
    driver = Driver()
    driver.receive("w1", register(Role.WORKER, 1), 0.0)
    driver.receive("s0", SERVER, 0.0)
    error, text = driver.failure("x", message, 0.0)
    assert error == kind
    assert part in text
    assert ("w0", start(0)) in driver.receive("w0", WORKER, 1.0)


def test_late_process_is_refused_and_the_job_undisturbed(started: Driver) -> None:
    error, text = started.failure("x", WORKER, 1.0)
    assert error == "JoinError"
    assert "too late" in text
    assert started.tick(1.0) == []


@pytest.mark.parametrize("way", ["connection", "launcher", "leave"])
def test_joiner_that_goes_before_the_start_frees_its_place(way: str) -> None:
    driver = Driver()
    driver.receive("old", register(Role.WORKER, 1), 0.0)
    if way == "connection":
        assert ("old", Probe()) in driver.tick(2.5)
        driver.unreachable("old", 2.5)
        driver.tick(3.0)
    elif way == "launcher":
        driver.receive("launcher", Exited(role=Role.WORKER, rank=1, code=1), 1.0)
    else:
        assert driver.receive("old", Leave(sequence=3), 1.0) == [("old", Ack(sequences=[3]))]
    driver.receive("w0", WORKER, 3.0)
    driver.receive("s0", SERVER, 3.0)
    assert ("new", start(1)) in driver.receive("new", register(Role.WORKER, 1), 3.0)


def test_dropped_joiner_that_lives_comes_back_with_its_next_register() -> None:
    driver = Driver()
    driver.receive("w0", WORKER, 0.0)
    driver.unreachable("w0", 0.5)
    driver.tick(1.0)
    assert driver.machine.processes == {}
    driver.receive("w0", WORKER, 1.5)
    driver.receive("s0", SERVER, 1.5)
    assert ("w0", start(0)) in driver.receive("w1", WORKER, 1.5)


def test_beats_are_answered_by_the_roster(started: Driver) -> None:
    assert started.receive("w0", Beat(), 1.0) == [("w0", Roster())]
    started.receive("l", Exited(role=Role.SERVER, rank=0, code=-9), 2.0)
    assert started.receive("w0", Beat(), 3.0) == [("w0", Roster(gone=[Gone(Role.SERVER, 0, True, 2.0, -9)]))]


def test_stopped_process_is_lost_after_dead_after(started: Driver) -> None:
    """A stopped process: no beats, and its connection breaks, so that probes cannot be sent."""
    assert started.keep_alive("w0", "s0", until=2) == []
    assert started.keep_alive("w0", "s0", start=3, until=3) == [("w1", Probe())]
    started.unreachable("w1", 3.0)
    assert started.keep_alive("w0", "s0", start=4, until=5) == []  # no need to probe again, not dead yet
    roster = Roster(gone=[Gone(Role.WORKER, 1, True, 6.0)])
    assert started.keep_alive("w0", "s0", start=6, until=6) == [("w0", roster), ("s0", roster)]
    assert started.keep_alive("w0", "s0", start=7, until=7) == []
    for message, sequence in ((Beat(), None), (Leave(sequence=5), 5), (WORKER, None)):
        ((_, answer),) = started.receive("w1", message, 20.0)
        assert isinstance(answer, Failed)
        assert answer.sequence == sequence
        assert answer.failure.error == "PeerLostError"
        assert answer.failure.text.startswith("you were removed from the job: worker 1 was declared dead")
        assert answer.failure.facts == {"role": "worker", "rank": 1, "age": 6.0}


def test_silent_process_with_a_standing_connection_is_never_lost(started: Driver) -> None:
    """Code that holds Python's lock: no beats, but ZeroMQ's threads keep the connection, so probes can be sent."""
    sent = started.keep_alive("w0", "s0", until=120)
    assert sent == [("w1", Probe())] * 118
    assert started.machine.gone == []


def test_silent_process_is_probed_once_a_heartbeat(started: Driver) -> None:
    started.receive("w0", Beat(), 3.0)
    started.receive("s0", Beat(), 3.0)
    probed = [quarter / 4 for quarter in range(20) if ("w1", Probe()) in started.tick(quarter / 4)]
    assert probed == [2.25, 3.25, 4.25]


def test_broken_connection_that_comes_back_is_no_death(started: Driver) -> None:
    started.keep_alive("w0", "s0", until=3)
    started.unreachable("w1", 3.0)
    started.receive("w1", Beat(), 4.5)
    assert [message for _, message in started.keep_alive("w0", "s0", start=5, until=30)] == [Probe()] * 24
    assert started.machine.gone == []


def test_launcher_reports_an_exit_at_once(started: Driver) -> None:
    exited = Exited(role=Role.WORKER, rank=1, code=3)
    roster = Roster(gone=[Gone(Role.WORKER, 1, True, 0.5, 3)])
    assert started.receive("launcher", exited, 0.5) == [("w0", roster), ("s0", roster)]
    assert started.receive("launcher", exited, 0.6) == []
    assert "its launcher saw it end with exit code 3" in started.failure("w1", Beat(), 0.7)[1]


def test_leave_is_acknowledged_and_told(started: Driver) -> None:
    roster = Roster(gone=[Gone(Role.WORKER, 1, False)])
    assert started.receive("w1", Leave(sequence=4), 1.0) == [
        ("w1", Ack(sequences=[4])), ("w0", roster), ("s0", roster),
    ]  # fmt: skip
    assert started.receive("w1", Leave(sequence=4), 2.0) == [("w1", Ack(sequences=[4]))]
    assert started.receive("w1", Beat(), 2.0) == [("w1", roster)]
    assert started.receive("launcher", Exited(role=Role.WORKER, rank=1, code=0), 3.0) == []
    assert started.keep_alive("w0", "s0", until=20, start=3) == []


def barrier(rank: int, sequence: int = 1) -> Barrier:
    return Barrier(sequence=sequence, rank=rank, turn=0, timeout=60.0)


def test_barrier_is_answered_to_all_callers(started: Driver) -> None:
    assert started.receive("w1", barrier(1, 8), 1.0) == []
    assert started.receive("w0", barrier(0, 3), 2.0) == [("w0", Ack(sequences=[3])), ("w1", Ack(sequences=[8]))]


def test_agreement_differs(started: Driver) -> None:
    started.receive("w0", Agree(sequence=1, rank=0, topic="compression", turn=0, value="a", timeout=9.0), 1.0)
    answers = started.receive("w1", Agree(sequence=2, rank=1, topic="compression", turn=0, value="b", timeout=9.0), 1.0)
    assert [(to, answer.sequence, answer.failure.error) for to, answer in answers if isinstance(answer, Failed)] == [
        ("w0", 1, "MismatchError"), ("w1", 2, "MismatchError"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "error"),
    [(Exited(role=Role.WORKER, rank=1, code=1), "PeerLostError"), (Leave(sequence=1), "PeerLeftError")],
)
def test_waiting_worker_is_told_who_is_gone(started: Driver, message: Message, error: str) -> None:
    started.receive("w0", barrier(0), 1.0)
    (answer,) = [m for to, m in started.receive("w1", message, 2.0) if to == "w0" and isinstance(m, Failed)]
    assert (answer.sequence, answer.failure.error, answer.failure.facts["rank"]) == (1, error, 1)


def test_barrier_timeout_comes_with_a_tick(started: Driver) -> None:
    started.receive("w0", Barrier(sequence=1, rank=0, turn=0, timeout=2.0), 0.0)
    assert started.tick(1.9) == []
    ((to, answer),) = started.tick(2.0)
    assert to == "w0"
    assert isinstance(answer, Failed)
    assert answer.failure.error == "OperationTimeoutError"
    assert "worker 1" in answer.failure.text


@pytest.mark.parametrize(
    ("sender", "message", "part"),
    [
        ("w0", barrier(1), "worker 0 .* called for worker 1"),
        ("s0", barrier(0), "server 0 .* called for worker 0"),
        ("x", Beat(), "does not know the sender"),
        ("w0", start(0), "takes no message of type Start"),
        ("left", barrier(1), "a process that is left may not send Barrier"),
    ],
)
def test_message_out_of_place(started: Driver, sender: str, message: Message, part: str) -> None:
    if sender == "left":
        started.receive("w1", Leave(sequence=1), 0.0)
        sender = "w1"
    with pytest.raises(ProtocolError, match=part):
        started.receive(sender, message, 1.0)
    started.machine.validate()


def test_status_before_and_after_the_start() -> None:
    driver = Driver()
    driver.receive("w", register(Role.WORKER, 1), 0.0)
    driver.receive("v", WORKER, 1.0)
    ((to, status),) = driver.receive("anybody", AskStatus(sequence=5), 3.0)
    assert to == "anybody"
    assert status == Status(
        sequence=5, role=Role.SCHEDULER, rank=0, job="j1", num_workers=2, num_servers=1,
        processes=[
            ProcessStatus(Role.WORKER, 1, "joining", 3.0, "", "a", 7),
            ProcessStatus(Role.WORKER, 0, "joining", 2.0, "", "a", 7),
        ],
    )  # fmt: skip
    driver.receive("s", SERVER, 4.0)
    driver.receive("w", Leave(sequence=1), 5.0)
    driver.receive("launcher", Exited(role=Role.WORKER, rank=0, code=1), 6.0)
    ((_, status),) = driver.receive("anybody", AskStatus(sequence=6), 7.0)
    assert isinstance(status, Status)
    assert [(one.role.value, one.rank, one.state, one.endpoint) for one in status.processes] == [
        ("worker", 1, "left", ""), ("worker", 0, "lost", ""), ("server", 0, "active", SERVERS[0]),
    ]  # fmt: skip


def test_finished_when_all_are_gone(started: Driver) -> None:
    assert not Driver().machine.finished
    started.receive("w0", Leave(sequence=1), 1.0)
    started.receive("l", Exited(role=Role.WORKER, rank=1, code=1), 2.0)
    assert not started.machine.finished
    started.receive("s0", Leave(sequence=1), 3.0)
    assert started.machine.finished


def test_finished_soon_after_the_last_worker_even_if_servers_stay(started: Driver) -> None:
    started.receive("w0", Leave(sequence=1), 1.0)
    started.receive("w1", Leave(sequence=1), 2.0)
    started.tick(2.0 + LINGER - 0.1)
    assert not started.machine.finished
    started.tick(2.0 + LINGER)
    assert started.machine.finished
