"""A process's own side of membership: what it sends when, what it concludes, and with which words it gives up."""

from __future__ import annotations

import pytest

from kvstore.config import Config
from kvstore.errors import JoinError, KVStoreError, MismatchError, PeerLostError, ProtocolError
from kvstore.machine import Action, Adopt, Connect, Send
from kvstore.member import Broken, Member, MemberState, PeerGone, Started
from kvstore.messages import (
    Ack,
    Beat,
    Failed,
    Failure,
    Gone,
    Leave,
    Message,
    Probe,
    Register,
    Role,
    Roster,
    Start,
    Values,
    Waiting,
)

CONFIG = Config(
    root_uri="10.0.0.1", root_port=9000, num_workers=2, num_servers=1,
    heartbeat=1.0, dead_after=5.0, timeout=20.0, retry=4.0,
)  # fmt: skip
REGISTER = Register(role=Role.WORKER, rank=1, num_workers=2, num_servers=1, chunk_elements=262_144, pid=7, host="a")
START = Start(job="j1", rank=1, servers=["tcp://10.0.0.2:4000"])
LOST_SERVER = Gone(Role.SERVER, 0, True, 5.5)


def worker() -> Member:
    member = Member(CONFIG, Role.WORKER, wanted_rank=1, pid=7, host="a")
    member.validate()
    return member


def started_worker() -> Member:
    member = worker()
    member.start(0.0)
    member.receive(START, 0.0)
    member.take_events()
    return member


def to_scheduler(*messages: Message) -> list[Action]:
    return [Send("scheduler", message) for message in messages]


def error_of(member: Member) -> KVStoreError:
    (event,) = member.take_events()
    assert isinstance(event, Broken)
    assert event.error is member.error
    assert member.state is MemberState.FAILED
    return event.error


def test_life_from_joining_to_leaving() -> None:
    member = worker()
    steps: list[tuple[float, Message | None, list[Action]]] = [
        (0.5, None, []),
        (1.0, None, to_scheduler(REGISTER)),
        (1.1, Waiting(text="0 of 1 servers registered; missing: server 0"), []),
        (1.5, None, []),
        (2.0, None, to_scheduler(REGISTER)),
        (2.1, START, [Adopt("j1")]),
        (2.2, START, []),
        (3.0, None, to_scheduler(Beat())),
        (3.1, Roster(), []),
        (3.5, Probe(), []),
        (4.0, None, to_scheduler(Beat())),
    ]
    connect = Connect("scheduler", "tcp://10.0.0.1:9000")
    assert member.start(0.0) == [connect, Send("scheduler", REGISTER)]
    for now, message, expected in steps:
        assert (member.tick(now) if message is None else member.receive(message, now)) == expected, now
        member.validate()
    assert member.take_events() == [Started("j1", 1, START.servers)]
    assert (member.rank, member.job, member.servers) == (1, "j1", START.servers)
    assert member.leave(9, 4.5) == to_scheduler(Leave(sequence=9))
    assert member.state.value == "leaving"
    assert member.tick(8.5) == to_scheduler(Beat(), Leave(sequence=9))
    assert member.receive(Ack(sequences=[9]), 8.6) == []
    assert member.state is MemberState.LEFT
    assert member.tick(100.0) == []
    assert member.take_events() == []


def test_waiting_text_tells_what_is_missing() -> None:
    member = worker()
    member.start(0.0)
    assert member.waiting_text == "no answer yet from the scheduler at tcp://10.0.0.1:9000"
    member.receive(Waiting(text="1 of 2 workers registered; missing: worker 0"), 1.0)
    assert member.waiting_text == "1 of 2 workers registered; missing: worker 0"
    member.receive(START, 2.0)
    assert member.waiting_text == ""


def test_join_timeout_without_any_answer_names_the_likely_causes() -> None:
    member = worker()
    member.start(0.0)
    for now in range(20):
        member.tick(float(now))
        assert member.state is MemberState.JOINING
    assert member.tick(20.0) == []
    error = error_of(member)
    assert isinstance(error, JoinError)
    assert (error.role, error.rank, error.address) == ("worker", 1, "tcp://10.0.0.1:9000")
    for part in ("worker (host a, pid 7)", "within 20 s", "nothing answered at tcp://10.0.0.1:9000", "not started",
                 "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "closed", "kvstore-server check"):  # fmt: skip
        assert part in error.text


def test_join_timeout_with_answers_passes_on_who_is_missing() -> None:
    member = worker()
    member.start(0.0)
    for now in range(20):
        member.receive(Waiting(text="1 of 2 servers registered; missing: server 1"), float(now))
        member.tick(float(now))
    member.tick(20.0)
    error = error_of(member)
    assert isinstance(error, JoinError)
    assert "said last: 1 of 2 servers registered; missing: server 1" in error.text
    assert "nothing answered" not in error.text


@pytest.mark.parametrize(("name", "kind"), [("JoinError", JoinError), ("MismatchError", MismatchError)])
def test_refusal_ends_joining_at_once(name: str, kind: type[KVStoreError]) -> None:
    member = worker()
    member.start(0.0)
    member.receive(Failed(failure=Failure(name, "the text of the scheduler", {"rank": 1})), 0.1)
    error = error_of(member)
    assert (type(error), error.text, error.rank) == (kind, "the text of the scheduler", 1)
    assert member.tick(5.0) == []
    assert member.leave(1, 6.0) == []
    member.validate()


def test_each_peer_is_told_once() -> None:
    member = started_worker()
    left = Gone(Role.WORKER, 0, False)
    member.receive(Roster(gone=[LOST_SERVER]), 1.0)
    member.receive(Roster(gone=[LOST_SERVER, left]), 2.0)
    member.receive(Roster(gone=[LOST_SERVER]), 3.0)  # overtaken, takes nothing back
    assert member.take_events() == [PeerGone(LOST_SERVER), PeerGone(left)]
    assert member.gone == {(Role.SERVER, 0): LOST_SERVER, (Role.WORKER, 0): left}
    assert (member.num_dead(), member.num_dead(Role.SERVER), member.num_dead(Role.WORKER)) == (1, 1, 0)
    assert member.state is MemberState.ACTIVE


def test_silent_scheduler_is_lost() -> None:
    member = started_worker()
    for now in (1.0, 2.0, 3.0, 4.0, 5.0):
        assert member.tick(now) == to_scheduler(Beat())
    member.tick(5.5)
    error = error_of(member)
    assert isinstance(error, PeerLostError)
    assert (error.role, error.rank, error.age) == ("scheduler", 0, 5.5)
    assert "tcp://10.0.0.1:9000" in error.text
    assert member.num_dead(Role.SCHEDULER) == 1


def test_any_message_keeps_the_scheduler_alive() -> None:
    member = started_worker()
    for now in range(1, 40):
        member.tick(float(now))
        if now % 5 == 0:
            member.receive(Probe(), float(now))
    assert member.state is MemberState.ACTIVE


def test_own_standstill_is_not_the_schedulers_silence() -> None:
    member = started_worker()
    member.tick(1.0)
    assert member.tick(61.0) == to_scheduler(Beat())  # this process was stopped, or another thread held the lock
    member.receive(Roster(), 61.1)
    assert member.state is MemberState.ACTIVE


def test_scheduler_that_stops_answering_while_joining_is_lost_but_one_never_heard_is_not() -> None:
    heard, unheard = worker(), worker()
    for member in (heard, unheard):
        member.start(0.0)
    heard.receive(Waiting(text="1 of 2 workers registered; missing: worker 0"), 0.0)
    for now in range(1, 7):
        heard.tick(float(now))
        unheard.tick(float(now))
    assert isinstance(error_of(heard), PeerLostError)
    assert unheard.state is MemberState.JOINING


REMOVED = Failed(failure=Failure("PeerLostError", "you were removed", {"role": "worker", "rank": 1, "age": 6.0}))


@pytest.mark.parametrize("message", [REMOVED, Roster(gone=[Gone(Role.WORKER, 1, True, 6.0)])])
@pytest.mark.parametrize("leaving", [False, True])
def test_removed_process_learns_it(message: Message, leaving: bool) -> None:
    member = started_worker()
    if leaving:
        member.leave(3, 1.0)
    member.receive(message, 30.0)
    error = error_of(member)
    assert isinstance(error, PeerLostError)
    assert (error.role, error.rank, error.age) == ("worker", 1, 6.0)
    assert "you were removed" in error.text
    member.validate()


def test_roster_replaces_a_lost_ack_of_leave() -> None:
    member = started_worker()
    member.leave(3, 1.0)
    member.receive(Roster(gone=[Gone(Role.WORKER, 1, False)]), 2.0)
    assert member.state is MemberState.LEFT
    assert member.take_events() == []


def test_leave_before_the_start_waits_for_nobody() -> None:
    member = worker()
    member.start(0.0)
    assert member.leave(1, 0.5) == to_scheduler(Leave(sequence=1))
    assert member.state is MemberState.LEFT
    assert member.receive(START, 0.6) == []
    assert member.take_events() == []


def test_concerns_leaves_other_requests_to_others() -> None:
    member = started_worker()
    failure = Failure("PeerLostError", "worker 0 died")
    assert not member.concerns(Ack(sequences=[3]))
    assert not member.concerns(Failed(sequence=2, failure=failure))
    member.leave(3, 1.0)
    assert member.concerns(Ack(sequences=[2, 3]))
    assert not member.concerns(Ack(sequences=[2]))
    assert member.concerns(Failed(sequence=3, failure=failure))
    assert member.concerns(Failed(failure=failure))
    assert member.concerns(Roster())


@pytest.mark.parametrize("message", [Ack(sequences=[1]), Values(entries=[]), Beat(), REGISTER])
def test_unexpected_message_is_named(message: Message) -> None:
    member = started_worker()
    with pytest.raises(ProtocolError, match=f"worker 1 is active: unexpected {type(message).__name__}"):
        member.receive(message, 1.0)
    assert member.state is MemberState.ACTIVE


def test_scheduler_address_is_bracketed_for_ipv6_and_may_be_given() -> None:
    config = Config(root_uri="::1", root_port=9000, num_workers=1, num_servers=1)
    assert Member(config, Role.SERVER, endpoint="x").start(0.0)[0] == Connect("scheduler", "tcp://[::1]:9000")
    member = Member(config, Role.SERVER, endpoint="x", scheduler="memory://scheduler")
    assert member.start(0.0)[0] == Connect("scheduler", "memory://scheduler")
