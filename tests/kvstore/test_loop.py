"""The loop: actions carried out in order, hostile bytes refused with an answer, bugs survived, ticks on time."""

import logging
import pickle
import random
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from kvstore.config import Config
from kvstore.errors import AddressError, ConfigError, ParameterError, ProtocolError, ServerError
from kvstore.loop import Loop
from kvstore.machine import Action, Adopt, Connect, Send
from kvstore.messages import Ack, AskStatus, Beat, Failed, Failure, Frame, Leave, Message, Roster, Start
from kvstore.wire import Limits, Wire
from kvstore.zmq_transport import ZmqTransport

PEER = "00112233445566aa"
SEED = 7


class Recorded:
    """A transport that gives what it is told to and keeps what is sent."""

    node = "ffeeddccbbaa0099"

    def __init__(self) -> None:
        self.arrive: list[tuple[str, list[Frame]]] = []
        self.sent: list[tuple[str, Message, Sequence[Frame]]] = []
        self.connected: dict[str, str] = {}
        self.down: set[str] = set()
        self.waits: list[float] = []

    def bind(self, endpoint: str) -> str:
        return endpoint

    def connect(self, name: str, endpoint: str) -> None:
        if endpoint == "bad":
            raise AddressError("bad address")
        self.connected[name] = endpoint

    def send(self, to: str, frames: Sequence[Frame]) -> bool:
        if to in self.down:
            return False
        self.sent.append((to, *Wire().decode(frames)))
        return True

    def receive(self, timeout: float) -> list[tuple[str, list[Frame]]]:
        self.waits.append(timeout)
        arrived, self.arrive = self.arrive, []
        return arrived

    def wake(self) -> None:
        pass

    def close(self, flush: float = 0.0) -> None:
        pass


class Scripted:
    """A machine that keeps what it is told, and answers or raises as scripted."""

    def __init__(self) -> None:
        self.finished = False
        self.heard: list[tuple[str, Message, list[bytes], float]] = []
        self.ticks: list[float] = []
        self.lost: list[str] = []
        self.answer: Callable[[Message], Iterable[Action]] = lambda message: []
        self.on_tick: Callable[[], Iterable[Action]] = list
        self.on_lost: Callable[[str], Iterable[Action]] = lambda to: []

    def receive(self, sender: str, message: Message, frames: Sequence[Frame], now: float) -> Iterable[Action]:
        self.heard.append((sender, message, [bytes(frame) for frame in frames], now))
        return self.answer(message)

    def unreachable(self, to: str, now: float) -> Iterable[Action]:
        self.lost.append(to)
        return self.on_lost(to)

    def tick(self, now: float) -> Iterable[Action]:
        self.ticks.append(now)
        return self.on_tick()


class Bench:
    """A loop over both, with a clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 100.0
        self.transport, self.machine = Recorded(), Scripted()
        self.loop = Loop(self.machine, self.transport, Wire("job"), clock=lambda: self.now, tick_every=0.5)

    def deliver(self, message: Message, sender: str = PEER, frames: Sequence[Frame] = (), job: str = "job") -> None:
        self.transport.arrive.append((sender, Wire(job).encode(message, frames)))

    def failures(self) -> list[Failed]:
        return [message for _, message, _ in self.transport.sent if isinstance(message, Failed)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_messages_reach_the_machine_and_its_actions_happen_in_order(bench: Bench) -> None:
    bench.machine.answer = lambda message: [
        Connect("server-0", "tcp://127.0.0.1:1"),
        Send("server-0", Beat()),
        Send(PEER, Ack(sequences=[5]), [b"payload"]),
    ]
    bench.deliver(Leave(sequence=5), frames=[b"frame"])
    bench.loop.step(1.0)
    assert bench.machine.heard == [(PEER, Leave(sequence=5), [b"frame"], 100.0)]
    assert bench.transport.connected == {"server-0": "tcp://127.0.0.1:1"}
    assert bench.transport.sent == [("server-0", Beat(), []), (PEER, Ack(sequences=[5]), [b"payload"])]


def test_adopt_changes_the_job_of_what_is_read_and_written(bench: Bench) -> None:
    bench.loop.perform([Adopt("new job")])
    assert bench.loop.wire == Wire("new job")
    bench.deliver(Beat(), job="job")
    bench.deliver(Beat(), job="new job")
    bench.loop.step(0)
    assert len(bench.machine.heard) == 1 and len(bench.failures()) == 1


def test_ticks_come_on_time_and_waits_end_at_the_next_one(bench: Bench) -> None:
    for step in range(20):
        bench.now = 100.0 + step * 0.125
        bench.loop.step(10.0)
    assert bench.machine.ticks == [100.0, 100.5, 101.0, 101.5, 102.0]
    assert bench.transport.waits[1:5] == [0.375, 0.25, 0.125, 0.0]
    bench.now = 200.0  # after a long pause there is one tick, not a hundred
    bench.loop.step(10.0)
    bench.loop.step(0.2)
    assert bench.machine.ticks[-1] == 200.0 and bench.transport.waits[-1] == 0.2
    assert len(bench.machine.ticks) == 6


def test_a_peer_that_cannot_be_reached_is_told_once_and_the_rest_still_sent(bench: Bench) -> None:
    bench.transport.down = {"aa", "bb"}
    bench.machine.on_lost = lambda to: [Send("aa", Beat()), Send("bb", Beat()), Send(PEER, Roster())]
    bench.loop.perform([Send("aa", Beat()), Send("aa", Beat()), Send(PEER, Beat())])
    assert bench.machine.lost == ["aa", "bb"]
    assert [message for _, message, _ in bench.transport.sent] == [Beat(), Roster(), Roster()]


def test_an_address_that_cannot_be_used_reaches_the_owner(bench: Bench) -> None:
    bench.machine.answer = lambda message: [Connect("server-0", "bad")]
    bench.deliver(Start(job="job", rank=0, servers=["bad"]))
    with pytest.raises(AddressError, match="bad address"):
        bench.loop.step(0)


def test_a_refused_request_is_answered_with_its_number_and_facts(bench: Bench) -> None:
    def refuse(message: Message) -> Iterable[Action]:
        raise ParameterError("threshold is wrong", parameter="threshold", given="-1")

    bench.machine.answer = refuse
    bench.deliver(Leave(sequence=5))
    bench.deliver(Beat())
    bench.loop.step(0)
    failure = Failure("ParameterError", "threshold is wrong", {"parameter": "threshold", "given": "-1"})
    assert bench.failures() == [Failed(failure=failure, sequence=5), Failed(failure=failure)]


def test_an_error_raised_while_actions_are_drawn_counts_as_the_machines(bench: Bench) -> None:
    def late(message: Message) -> Iterator[Action]:
        yield Send(PEER, Beat())
        raise ConfigError("late")

    bench.machine.answer = late
    bench.deliver(Leave(sequence=1))
    bench.loop.step(0)
    assert [message.failure.text for message in bench.failures()] == ["late"]


def test_a_bug_is_logged_with_traceback_answered_and_survived(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def bug(*_: object) -> Iterable[Action]:
        raise ZeroDivisionError("a bug")

    bench.machine.answer = bench.machine.on_tick = bug
    bench.deliver(Leave(sequence=5))
    bench.loop.step(0)
    (failed,) = bench.failures()
    assert failed.sequence == 5 and failed.failure.error == ServerError.__name__ and "a bug" in failed.failure.text
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and record.exc_info and "Leave" in record.getMessage()
    bench.machine.answer = lambda message: [Send(PEER, Beat())]
    bench.machine.on_tick = lambda: [Send(PEER, Beat())]
    bench.now += 1
    bench.deliver(Leave(sequence=6))
    bench.loop.step(0)
    assert [message for _, message, _ in bench.transport.sent[1:]] == [Beat(), Beat()]


def test_an_answer_that_cannot_be_encoded_does_not_end_the_loop(bench: Bench) -> None:
    wrong: Any = object()
    bench.machine.answer = lambda message: [Send(PEER, Ack(sequences=[wrong]))]
    bench.deliver(Leave(sequence=5))
    bench.loop.step(0)
    bench.machine.answer = lambda message: [Send(PEER, Beat())]
    bench.deliver(Leave(sequence=6))
    bench.loop.step(0)
    assert bench.transport.sent[-1][1] == Beat()


def test_a_failure_is_never_answered_with_a_failure(bench: Bench) -> None:
    def refuse(message: Message) -> Iterable[Action]:
        raise ProtocolError("no")

    bench.machine.answer = refuse
    bench.deliver(Failed(failure=Failure("JoinError", "x"), sequence=1))
    bench.loop.step(0)
    assert bench.machine.heard and not bench.transport.sent


def test_unreadable_bytes_are_answered_to_those_who_connected_to_us_only(bench: Bench) -> None:
    bench.loop.perform([Connect("scheduler", "tcp://127.0.0.1:1")])
    bench.transport.arrive = [("scheduler", [b"junk"]), (PEER, [b"junk"])]
    bench.loop.step(0)
    assert [(to, type(message)) for to, message, _ in bench.transport.sent] == [(PEER, Failed)]
    assert bench.failures()[0].failure.error == "ProtocolError" and bench.failures()[0].sequence is None


def test_the_answer_does_not_grow_with_what_is_refused(bench: Bench) -> None:
    job = "x" * 60_000
    bench.deliver(Beat(), job=job)
    bench.loop.step(0)
    assert 0 < len(bench.failures()[0].failure.text) <= 4000


def test_refusals_are_logged_once_a_second_with_a_count(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        bench.transport.arrive = [(PEER, [b"junk"])] * 50
        bench.loop.step(0)
        bench.now += 0.4
    bench.now += 1
    bench.transport.arrive = [(PEER, [b"junk"])]
    bench.loop.step(0)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2 and all(record.levelno == logging.WARNING for record in caplog.records)
    assert PEER in texts[0] and "149 more" in texts[1]


def test_run_ends_when_the_machine_has_finished_or_stop_is_set(bench: Bench) -> None:
    def finish(message: Message) -> Iterable[Action]:
        bench.machine.finished = True
        return [Send(PEER, Ack(sequences=[1]))]

    bench.machine.answer = finish
    bench.deliver(Leave(sequence=1))
    bench.loop.run()
    assert bench.transport.sent[-1][1] == Ack(sequences=[1])
    bench.machine.finished = False
    stop = threading.Event()
    bench.machine.on_tick = lambda: stop.set() or []  # type: ignore[func-returns-value]
    bench.now += 1
    bench.loop.run(stop)
    assert stop.is_set()


def test_run_notices_stop_at_once_when_woken() -> None:
    transport = ZmqTransport(Config())
    try:
        stop = threading.Event()
        loop = Loop(Scripted(), transport, Wire(), tick_every=60.0)
        loop.step(0)  # the first tick; the next one is a minute away
        thread = threading.Thread(target=loop.run, args=(stop,))
        thread.start()
        stop.set()
        transport.wake()
        thread.join(20)
        assert not thread.is_alive()
    finally:
        transport.close()


class _Marker:
    """Unpickling one creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def hostile_messages(marker: Path) -> list[list[bytes]]:
    """What an attacker sends: never a message of the protocol."""
    dice = random.Random(SEED)
    evil = pickle.dumps(_Marker(marker))
    good = bytes(Wire("job").encode(Beat())[0])
    nested = msgpack.packb({"v": 1, "job": "job", "body": {"type": "state", "sequence": evil}})
    return [
        [evil],
        [evil] * 4,
        [b"", evil],
        [nested],
        [bytes(Wire("other job").encode(Beat())[0]), evil],
        [msgpack.packb({"v": 99, "job": "job", "body": {"type": "beat"}})],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\xdf\xff\xff\xff\xff", evil],
        [b"\xc6\xff\xff\xff\xff" + evil],
        [b"\xdb" + struct.pack(">I", 2**31) + b"x"],
        [b"\x91" * 50_000],
        [good] + [b"x"] * 10_000,
        [good, bytes(Limits.frame + 1)],
        [good + b"\0"],
        *[[dice.randbytes(dice.randrange(200)) for _ in range(dice.randrange(1, 5))] for _ in range(200)],
    ]


def test_hostile_input_over_a_real_socket_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Cases of attack: pickles in every position, random bytes, huge declared lengths, other versions and jobs."""
    caplog.set_level(logging.ERROR)
    marker = tmp_path / "marker"
    transport, machine = ZmqTransport(Config()), Scripted()
    machine.answer = lambda message: [Send(machine.heard[-1][0], Ack(sequences=[1]))]
    loop = Loop(machine, transport, Wire("job"))
    context = zmq.Context()
    attacker, friend = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    try:
        endpoint = transport.bind("tcp://127.0.0.1:0")
        messages = [
            message for message in hostile_messages(marker) if all(len(frame) <= Limits.frame for frame in message)
        ]
        for socket in (attacker, friend):
            socket.connect(endpoint)
        for message in messages:
            attacker.send_multipart(message)
        answers: list[Message] = []
        end = time.monotonic() + 60
        while len(answers) < len(messages) and time.monotonic() < end:
            loop.step(0.05)
            while attacker.poll(0):
                answers.append(Wire().decode(attacker.recv_multipart())[0])
        assert len(answers) == len(messages)
        assert all(isinstance(a, Failed) and a.failure.error == "ProtocolError" for a in answers)
        assert not marker.exists() and not machine.heard
        attacker.send_multipart([b"x", bytes(Limits.frame + 1)])  # its connection is cut; nobody else's
        friend.send_multipart([bytes(frame) for frame in Wire("job").encode(AskStatus(sequence=1))])
        while not friend.poll(0) and time.monotonic() < end:
            loop.step(0.05)
        assert Wire("job").decode(friend.recv_multipart(zmq.NOBLOCK))[0] == Ack(sequences=[1])
        assert not caplog.records, "a refusal is no bug"
    finally:
        attacker.close(linger=0)
        friend.close(linger=0)
        context.term()
        transport.close()


def test_the_pickle_of_these_tests_would_do_harm(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(_Marker(tmp_path / "marker")))  # noqa: S301 (the attack itself)
    assert (tmp_path / "marker").exists()
