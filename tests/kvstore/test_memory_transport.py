"""The transport within one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.errors import AddressError
from kvstore.memory_network import Faults, Network
from kvstore.memory_transport import MemoryTransport
from kvstore.messages import Frame
from kvstore.transport import Transport


class Pair:
    """A server on memory://server and a client that knows it as 'server-0'."""

    def __init__(self, faults: Faults | None = None, seed: int = 0) -> None:
        self.network = Network(faults=faults or Faults(), seed=seed)
        self.server = MemoryTransport(self.network, "server")
        self.client = MemoryTransport(self.network, "client")
        self.server.bind("memory://server")
        self.client.connect("server-0", "memory://server")

    def connected(self) -> Pair:
        self.network.clock.advance(0.01)
        return self


def numbers(arrived: list[tuple[str, list[Frame]]]) -> list[int]:
    return [int(bytes(frames[0])) for _, frames in arrived]


def drain(transport: MemoryTransport, seconds: float) -> list[int]:
    until = transport._network.clock.now + seconds
    got: list[int] = []
    while arrived := transport.receive(until - transport._network.clock.now):
        got += numbers(arrived)
    return got


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield Pair().connected()


def test_it_is_a_transport() -> None:
    transport: Transport = MemoryTransport(Network(), "a")
    assert transport.node == "a"


def test_messages_go_by_name_one_way_and_by_node_id_back(pair: Pair) -> None:
    assert pair.client.send("server-0", [b"head", memoryview(b"payload")])
    assert pair.server.receive(1.0) == [("client", [b"head", b"payload"])]
    assert pair.server.send("client", [b"answer"])
    assert pair.client.receive(1.0) == [("server-0", [b"answer"])]


def test_receive_lets_only_its_timeout_pass() -> None:
    pair = Pair().connected()
    before = pair.network.clock.now
    assert pair.server.receive(2.5) == []
    assert pair.network.clock.now == before + 2.5


def test_wake_makes_the_next_receive_return_at_once(pair: Pair) -> None:
    before = pair.network.clock.now
    pair.server.wake()
    assert pair.server.receive(2.5) == []
    assert pair.network.clock.now == before
    pair.server.receive(2.5)
    assert pair.network.clock.now == before + 2.5


@pytest.mark.parametrize("to", ["nobody", "server-1"])
def test_a_send_without_connection_returns_false(pair: Pair, to: str) -> None:
    assert not pair.server.send(to, [b"x"])
    assert not pair.client.send(to, [b"x"])


def test_what_is_sent_before_anybody_listens_waits() -> None:
    network = Network()
    client = MemoryTransport(network, "client")
    client.connect("server-0", "memory://server")
    for number in range(3):
        assert client.send("server-0", [str(number).encode()])
    network.clock.advance(5.0)
    server = MemoryTransport(network, "server")
    server.bind("memory://server")
    assert drain(server, 1.0) == [0, 1, 2]


def test_a_broken_connection_loses_what_is_under_way_both_ways_and_then_works_again(pair: Pair) -> None:
    pair.client.send("server-0", [b"1"])
    pair.server.send("client", [b"2"])
    assert pair.client.sever("server-0")
    assert not pair.client.sever("server-0")
    assert pair.client.send("server-0", [b"3"]), "the side that connected queues"
    assert not pair.server.send("client", [b"4"]), "the side that listens cannot send"
    assert drain(pair.server, 1.0) == [3]
    assert pair.server.send("client", [b"5"])
    assert drain(pair.client, 1.0) == [5]


def test_connect_again_moves_the_name(pair: Pair) -> None:
    other = MemoryTransport(pair.network, "other")
    assert other.bind("memory://*") == "memory://other"
    pair.client.connect("server-0", "memory://other")
    assert not pair.server.send("client", [b"1"])
    pair.client.send("server-0", [b"2"])
    assert drain(other, 1.0) == [2]


def test_close_with_flush_delivers_and_without_loses(pair: Pair) -> None:
    pair.client.send("server-0", [b"1"])
    pair.client.close(flush=1.0)
    assert not pair.client.send("server-0", [b"2"])
    assert drain(pair.server, 2.0) == [1]
    assert not pair.server.send("client", [b"3"])
    hasty = Pair().connected()
    hasty.client.send("server-0", [b"1"])
    hasty.client.close()
    assert drain(hasty.server, 2.0) == []


def test_an_endpoint_is_free_again_after_close(pair: Pair) -> None:
    with pytest.raises(AddressError, match="memory://server is in use by server"):
        pair.client.bind("memory://server")
    pair.server.close()
    pair.client.bind("memory://server")


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "memory://", "server"])
def test_other_addresses_are_refused(endpoint: str) -> None:
    transport = MemoryTransport(Network(), "a")
    with pytest.raises(AddressError, match="memory://name"):
        transport.bind(endpoint)
    with pytest.raises(AddressError, match="memory://name"):
        transport.connect("b", endpoint)
