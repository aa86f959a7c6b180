"""What every transport does: the same checks over ZeroMQ (tcp and ipc) and over memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.clock import SimulatedClock
from kvstore.config import Config
from kvstore.memory_network import Faults, Network
from kvstore.memory_transport import MemoryTransport
from kvstore.messages import Frame
from kvstore.transport import Transport
from kvstore.zmq_transport import ZmqTransport

Pair = tuple[Transport, Transport]


def zmq_pair(endpoint: str) -> Pair:
    one, other = ZmqTransport(Config()), ZmqTransport(Config())
    other.connect("one", one.bind(endpoint))
    return one, other


def memory_pair() -> Pair:
    network = Network(SimulatedClock(0.0), Faults(), 0)
    one, other = MemoryTransport(network, "a"), MemoryTransport(network, "b")
    other.connect("one", one.bind("memory://*"))
    return one, other


PAIRS: dict[str, Callable[[], Pair]] = {
    "tcp": lambda: zmq_pair("tcp://127.0.0.1:0"),
    "ipc": lambda: zmq_pair("ipc://*"),
    "memory": memory_pair,
}


@pytest.fixture(params=sorted(PAIRS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    one, other = PAIRS[request.param]()
    yield one, other
    other.close()
    one.close()


def collect(transport: Transport, count: int) -> list[tuple[str, list[Frame]]]:
    found: list[tuple[str, list[Frame]]] = []
    deadline = time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline:
        found += transport.receive(0.5)
    return found


def test_whole_messages_in_order_both_ways(pair: Pair) -> None:
    one, other = pair
    sent = [[b"header%d" % number, bytes([number]) * size] for number, size in enumerate((0, 1, 1 << 20, 3, 70_000))]
    for frames in sent:
        assert other.send("one", frames)
    received = collect(one, len(sent))
    assert [[bytes(frame) for frame in frames] for _, frames in received] == sent
    assert len({sender for sender, _ in received}) == 1
    sender = received[0][0]
    for frames in reversed(sent):
        assert one.send(sender, frames)
    back = collect(other, len(sent))
    assert [name for name, _ in back] == ["one"] * len(sent)
    assert [[bytes(frame) for frame in frames] for _, frames in back] == sent[::-1]


def test_an_unknown_peer_cannot_be_reached(pair: Pair) -> None:
    one, _ = pair
    assert not one.send("00112233445566aa", [b"x"])


def test_receive_ends_without_messages_and_after_a_wake(pair: Pair) -> None:
    one, _ = pair
    assert one.receive(0.0) == []
    one.wake()
    started = time.monotonic()
    assert one.receive(5.0) == []
    assert time.monotonic() - started < 4.0


def test_close_twice(pair: Pair) -> None:
    one, other = pair
    other.close()
    other.close()
    one.close(flush=0.1)
