"""The ZeroMQ transport over loopback: addressing, failure of peers, hostile peers, fork, closing in bounded time."""

import contextlib
import gc
import os
import random
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvstore.addresses import advertise
from kvstore.config import Config, TransportName
from kvstore.errors import AddressError, ClosedError
from kvstore.messages import Frame, Role
from kvstore.transport import Transport
from kvstore.wire import Limits
from kvstore.zmq_transport import ZmqTransport, _real_endpoint

PATIENCE = 20.0
SEED = 20
CONFIG = Config(role=Role.SERVER, root_uri="127.0.0.1", root_port=9, num_workers=1, num_servers=1)
Make = Callable[..., ZmqTransport]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes transports and closes them."""
    made: list[ZmqTransport] = []

    def build(config: Config = CONFIG, node: str = "") -> ZmqTransport:
        made.append(ZmqTransport(config, node))
        return made[-1]

    yield build
    for transport in made:
        transport.close()


@pytest.fixture
def raw() -> Iterator[Callable[..., "zmq.Socket[bytes]"]]:
    """Makes bare ZeroMQ sockets, as a foreign program would."""
    context = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []

    def build(endpoint: str, identity: bytes = b"", kind: int = zmq.DEALER) -> "zmq.Socket[bytes]":
        made = context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        if identity:
            made.setsockopt(zmq.IDENTITY, identity)
        made.connect(endpoint)
        sockets.append(made)
        return made

    yield build
    context.destroy(linger=0)


def collect(transport: ZmqTransport, count: int) -> list[tuple[str, list[Frame]]]:
    found: list[tuple[str, list[Frame]]] = []
    end = time.monotonic() + PATIENCE
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} messages came"
        found += transport.receive(0.5)
    return found


def until(transport: ZmqTransport, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        transport.receive(0.02)


def data(frames: list[Frame]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


def pair(make: Make, server: Config = CONFIG, endpoint: str = "tcp://127.0.0.1:0") -> tuple[ZmqTransport, ZmqTransport]:
    left, right = make(server), make()
    right.connect("server-0", left.bind(endpoint))
    return left, right


def test_is_a_transport(make: Make) -> None:
    transport: Transport = make()
    assert len(transport.node) == 16 and not bytes.fromhex(transport.node).startswith(b"\0")


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "tcp://localhost:0", "ipc://*", "tcp://[::1]:0"])
def test_messages_arrive_in_order_and_answers_find_back(make: Make, endpoint: str) -> None:
    if "::1" in endpoint:
        with socket.socket(socket.AF_INET6) as probe:
            try:
                probe.bind(("::1", 0))
            except OSError:
                pytest.skip("this kernel has no IPv6")
    server, worker = pair(make, endpoint=endpoint.replace("localhost", "127.0.0.1"))
    for number in range(200):
        assert worker.send("server-0", [b"%d" % number, memoryview(b"x" * number), b""])
    got = collect(server, 200)
    assert [sender for sender, _ in got] == [worker.node] * 200
    assert [data(frames) for _, frames in got] == [[b"%d" % n, b"x" * n, b""] for n in range(200)]
    assert server.send(worker.node, [b"answer"])
    assert [(name, data(frames)) for name, frames in collect(worker, 1)] == [("server-0", [b"answer"])]


def test_connecting_by_name_to_a_server_on_ipv4_only(make: Make) -> None:
    server, worker = make(), make()
    port = server.bind("tcp://127.0.0.1:0").rpartition(":")[2]
    worker.connect("s", f"tcp://localhost:{port}")
    worker.send("s", [b"hello"])
    assert collect(server, 1)[0][0] == worker.node


def test_sending_before_anybody_listens_is_delivered_later(make: Make) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    worker, server = make(), make()
    worker.connect("server-0", endpoint)
    assert worker.send("server-0", [b"early"])
    server.bind(endpoint)
    assert data(collect(server, 1)[0][1]) == [b"early"]


def test_large_frames_are_not_copied_small_ones_are(make: Make) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    worker, server = make(), make()
    worker.connect("server-0", endpoint)
    small, large = bytearray(1000), bytearray(1 << 20)
    worker.send("server-0", [b"h", small, memoryview(large)])
    small[:3] = large[:3] = b"new"  # nobody listens yet: a frame that was not copied shows it
    server.bind(endpoint)
    _, frames = collect(server, 1)[0]
    assert bytes(frames[1][:3]) == b"\0\0\0" and bytes(frames[2][:3]) == b"new"
    assert isinstance(frames[2], memoryview) and frames[2].nbytes == 1 << 20


def test_unknown_and_vanished_peers_cannot_be_sent_to(make: Make) -> None:
    server, worker = pair(make)
    worker.send("server-0", [b"hello"])
    collect(server, 1)
    assert not server.send("0123456789abcdef", [b"x"]) and not server.send("scheduler", [b"x"])
    assert not make().send("0123456789abcdef", [b"x"])
    worker.close()
    until(server, lambda: not server.send(worker.node, [b"x"]))


def test_connect_to_another_endpoint_replaces_the_first(make: Make) -> None:
    first, worker = pair(make)
    second = make()
    worker.send("server-0", [b"1"])
    collect(first, 1)
    worker.connect("server-0", second.bind("tcp://127.0.0.1:0"))
    worker.send("server-0", [b"2"])
    assert data(collect(second, 1)[0][1]) == [b"2"]
    assert second.send(worker.node, [b"3"]) and data(collect(worker, 1)[0][1]) == [b"3"]


def test_a_reconnecting_peer_replaces_its_old_connection(make: Make) -> None:
    server, worker = pair(make)
    worker.send("server-0", [b"old"])
    collect(server, 1)
    again = make(node=worker.node)
    again.connect("s", _real_endpoint(server._router))  # type: ignore[arg-type]
    again.send("s", [b"new"])
    assert data(collect(server, 1)[0][1]) == [b"new"]
    assert server.send(worker.node, [b"for the new one"]) and data(collect(again, 1)[0][1]) == [b"for the new one"]


def test_several_endpoints_of_one_server_and_the_choice_of_ipc(make: Make) -> None:
    server, near, far = make(), make(), make(Config(transport=TransportName.TCP))
    bound = [server.bind("tcp://127.0.0.1:0"), server.bind("ipc://*")]
    offer = advertise(CONFIG, bound)
    for worker in (near, far):
        worker.connect("server-0", offer)
        worker.send("server-0", [b"x"])
    assert {sender for sender, _ in collect(server, 2)} == {near.node, far.node}
    chosen = [_real_endpoint(worker._dealers["server-0"]) for worker in (near, far)]
    assert chosen == [bound[1], bound[0]]


def test_ipc_folder_is_private_and_goes_away(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    for place in (tmp_path, long):  # a path beyond the limit of the system falls back to a short one
        monkeypatch.setattr("tempfile.tempdir", str(place))
        transport = make()
        path = Path(transport.bind("ipc://*").removeprefix("ipc://"))
        assert path.is_socket() and path.parent.stat().st_mode & 0o777 == 0o700 and len(str(path)) <= 107
        transport.close()
        assert not path.parent.exists() and not list(long.iterdir())


def test_busy_port_names_the_port_and_a_range_takes_the_first_free_one(make: Make) -> None:
    holder = make()
    taken = int(holder.bind("tcp://127.0.0.1:0").rpartition(":")[2])
    with pytest.raises(AddressError, match=f"127.0.0.1:{taken}: in use") as caught:
        make().bind(f"tcp://127.0.0.1:{taken}")
    assert caught.value.address == f"tcp://127.0.0.1:{taken}"
    last = min(taken + 20, 65535)
    bound = make().bind(f"tcp://127.0.0.1:{taken}-{last}")
    assert taken < int(bound.rpartition(":")[2]) <= last
    with pytest.raises(AddressError, match=r"in use \(every port of the range\)"):
        make().bind(f"tcp://127.0.0.1:{taken}-{taken}")


def test_foreign_address_names_the_option(make: Make) -> None:
    with pytest.raises(AddressError, match=r"192\.0\.2\.77:9000: not a local address.*--host or KVSTORE_BIND_HOST"):
        make().bind("tcp://192.0.2.77:9000")


def test_wake_from_another_thread_ends_the_wait_once(make: Make) -> None:
    transport = make()

    def wake_often() -> None:
        for _ in range(1000):
            transport.wake()

    timer = threading.Timer(0.05, wake_often)
    timer.start()
    began = time.monotonic()
    assert transport.receive(PATIENCE) == [] and time.monotonic() - began < PATIENCE / 2
    timer.join()
    transport.receive(0)
    began = time.monotonic()
    transport.receive(0.05)
    assert time.monotonic() - began >= 0.04
    transport.wake()  # before the wait counts as well
    assert transport.receive(PATIENCE) == [] and time.monotonic() - began < PATIENCE / 2
    transport.close()
    transport.wake()


def test_a_flood_from_one_server_leaves_room_for_another(make: Make) -> None:
    loud, quiet, worker = make(), make(), make()
    for name, server in (("loud", loud), ("quiet", quiet)):
        worker.connect(name, server.bind("tcp://127.0.0.1:0"))
        worker.send(name, [b"hi"])
        collect(server, 1)
    for _ in range(500):
        loud.send(worker.node, [b"x"])
    quiet.send(worker.node, [b"y"])
    until(quiet, lambda: all(dealer.poll(0) for dealer in worker._dealers.values()))
    names = [name for name, _ in worker.receive(1.0)]
    assert "quiet" in names and len(names) <= 100


@pytest.mark.parametrize("frames", [[], [memoryview(b"abcdef")[::2]], [b"h", memoryview(b"abcdef")[::2], b""]])
def test_what_cannot_be_sent_leaves_the_next_message_whole(make: Make, frames: list[Frame]) -> None:
    server, worker = pair(make)
    with pytest.raises(ValueError, match="frame"):
        worker.send("server-0", frames)
    worker.send("server-0", [b"whole"])
    assert data(collect(server, 1)[0][1]) == [b"whole"]


def test_hostile_peers_cannot_take_names_memory_or_the_socket(make: Make, raw: Callable[..., Any]) -> None:
    config = Config(root_uri="127.0.0.1", chunk_elements=64)
    server, worker = pair(make, config)
    server.connect("scheduler", make().bind("tcp://127.0.0.1:0"))
    endpoint = worker._endpoints["server-0"]
    impostor = raw(endpoint, b"scheduler")
    impostor.send(b"trust me")
    assert collect(server, 1)[0][0] == b"scheduler".hex()
    assert server.send(b"scheduler".hex(), [b"no"]) and impostor.recv() == b"no"
    nameless = raw(endpoint)
    nameless.send_multipart([b"f"] * 10_000)
    sender, frames = collect(server, 1)[0]
    assert Limits().frames < len(frames) <= Limits().frames + 1 and server.send(sender, [b"ok"])
    large = raw(endpoint, b"large")
    large.send(bytes(config.limits.frame + 1))  # its connection is cut before the frame is stored
    stream = socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])))
    with stream, contextlib.suppress(OSError):
        stream.sendall(random.Random(SEED).randbytes(4096))  # ZeroMQ may take it for a message of its first version
    worker.send("server-0", [b"still here"])
    seen: list[tuple[str, list[Frame]]] = []
    while worker.node not in dict(seen):
        seen += collect(server, 1)
    assert data(dict(seen)[worker.node]) == [b"still here"]
    assert b"large".hex() not in dict(seen)


def test_close_flushes_what_is_queued(make: Make) -> None:
    server, worker = pair(make)
    for _ in range(30):
        worker.send("server-0", [b"h", bytes(1 << 20)])
    closing = threading.Thread(target=lambda: collect(server, 30))
    closing.start()
    worker.close(flush=PATIENCE)
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_close_never_hangs_on_a_peer_that_does_not_listen(make: Make) -> None:
    worker = make()
    worker.connect("nobody", "tcp://127.0.0.1:1")
    for _ in range(10):
        worker.send("nobody", [bytes(1 << 20)])
    began = time.monotonic()
    worker.close(flush=0.2)
    worker.close(flush=60)
    assert time.monotonic() - began < 5
    for call in (
        lambda: worker.send("nobody", [b"x"]),
        lambda: worker.receive(0),
        lambda: worker.bind("tcp://[::1]:0"),
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_a_forked_child_can_neither_use_nor_disturb_the_transport(make: Make) -> None:
    server, worker = pair(make)
    path = Path(server.bind("ipc://*").removeprefix("ipc://"))
    worker.send("server-0", [b"before"])
    collect(server, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of fork beside threads
        process = os.fork()
    if process == 0:
        status = 1
        try:
            for call in (lambda: worker.send("server-0", [b"child"]), lambda: worker.receive(0)):
                with pytest.raises(ClosedError, match="forked"):
                    call()
            server.close(1.0)
            worker.close(1.0)
            del server, worker
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert path.exists()
    for number in range(100):
        worker.send("server-0", [b"%d" % number])
        assert data(collect(server, 1)[0][1]) == [b"%d" % number]
        assert server.send(worker.node, [b"ok"]) and collect(worker, 1)


def test_an_unclosed_transport_does_not_keep_the_process() -> None:
    script = (
        "from kvstore.config import Config\nfrom kvstore.zmq_transport import ZmqTransport\n"
        "t = ZmqTransport(Config())\nt.connect('s', 'tcp://127.0.0.1:1')\nt.send('s', [bytes(1 << 20)])\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=PATIENCE, check=False).returncode == 0
