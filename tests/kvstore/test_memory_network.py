"""What happens to messages between memory transports: order, faults, stopped processes, cuts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.memory_network import Faults, Network
from kvstore.memory_transport import MemoryTransport
from kvstore.messages import Frame


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


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_a_pair_is_kept_under_delays_stalls_and_duplicates(seed: int) -> None:
    pair = Pair(Faults(delay=(0.001, 0.5), stall=0.1, duplicate=0.2), seed).connected()
    pair.network.clock.advance(1.0)
    for number in range(50):
        pair.client.send("server-0", [str(number).encode()])
    got = drain(pair.server, 60.0)
    assert got == sorted(got), f"seed {seed}"
    assert sorted(set(got)) == list(range(50)), f"seed {seed}"
    assert len(got) > 50, f"seed {seed}"


def test_messages_of_different_peers_overtake_each_other() -> None:
    network = Network(faults=Faults(delay=(0.001, 0.5)), seed=1)
    server = MemoryTransport(network, "server")
    server.bind("memory://server")
    clients = [MemoryTransport(network, f"client-{number}") for number in range(20)]
    for client in clients:
        client.connect("server-0", "memory://server")
    network.clock.advance(1.0)
    for number, client in enumerate(clients):
        client.send("server-0", [str(number).encode()])
    got = drain(server, 1.0)
    assert got != sorted(got)
    assert sorted(got) == list(range(20))


def test_disconnect_faults_lose_messages_but_never_their_order() -> None:
    pair = Pair(Faults(disconnect=0.1), seed=3).connected()
    for number in range(200):
        pair.client.send("server-0", [str(number).encode()])
        pair.network.clock.advance(0.05)
    got = drain(pair.server, 1.0)
    assert got == sorted(set(got))
    assert 100 < len(got) < 200


def test_a_stopped_node_gets_its_messages_when_it_goes_on(pair: Pair) -> None:
    pair.network.freeze(pair.server.port, True)
    pair.client.send("server-0", [b"1"])
    pair.client.send("server-0", [b"2"])
    assert drain(pair.server, 2.0) == []
    pair.network.freeze(pair.server.port, False)
    assert drain(pair.server, 0.0) == [1, 2]


def test_connections_of_a_node_stopped_for_long_break(pair: Pair) -> None:
    pair.network.freeze(pair.client.port, True)
    assert pair.server.send("client", [b"1"])
    pair.network.clock.advance(3.5)
    assert not pair.server.send("client", [b"2"])
    pair.network.freeze(pair.client.port, False)
    pair.network.clock.advance(1.0)
    assert pair.server.send("client", [b"3"])
    assert drain(pair.client, 1.0) == [3]


def test_a_cut_holds_messages_then_breaks_until_it_is_healed(pair: Pair) -> None:
    pair.network.cut("server", "client")
    pair.client.send("server-0", [b"1"])
    pair.network.clock.advance(1.0)
    pair.network.heal("client", "server")
    assert drain(pair.server, 0.0) == [1]
    pair.network.cut("client", "server")
    pair.client.send("server-0", [b"2"])
    pair.network.clock.advance(10.0)
    assert not pair.server.send("client", [b"3"])
    pair.client.send("server-0", [b"4"])
    assert drain(pair.server, 10.0) == []
    pair.network.heal("client", "server")
    assert drain(pair.server, 1.0) == [4]


def test_a_short_cut_does_not_shorten_the_patience_with_the_next(pair: Pair) -> None:
    pair.network.cut("server", "client")
    pair.network.clock.advance(2.0)
    pair.network.heal("server", "client")
    pair.network.cut("server", "client")
    pair.network.clock.advance(2.0)
    pair.network.heal("server", "client")
    assert pair.server.send("client", [b"1"])


def test_a_frame_changed_after_send_is_caught(pair: Pair) -> None:
    frame = bytearray(b"1")
    pair.client.send("server-0", [b"head", frame])
    frame[0] = 0
    with pytest.raises(AssertionError, match="frame 1 of a message from client to server was changed"):
        pair.server.receive(1.0)


def test_received_frames_are_the_receivers_own(pair: Pair) -> None:
    frame = bytearray(b"1")
    pair.client.send("server-0", [frame])
    ((_, frames),) = pair.server.receive(1.0)
    frame[0] = 0
    assert frames == [b"1"]
