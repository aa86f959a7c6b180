"""What the ZeroMQ transport notices of other processes: stopped, killed, and busy ones that are neither."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.config import Config
from kvstore.messages import Frame
from kvstore.zmq_transport import ZmqTransport

PATIENCE = 20.0
QUICK = Config(heartbeat=0.2, dead_after=3.0)
Listen = Callable[[Config], ZmqTransport]


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Makes transports and closes them."""
    made: list[ZmqTransport] = []

    def build(config: Config) -> ZmqTransport:
        made.append(ZmqTransport(config))
        return made[-1]

    yield build
    for transport in made:
        transport.close()


def first(server: ZmqTransport) -> tuple[str, list[Frame]]:
    end = time.monotonic() + PATIENCE
    while not (found := server.receive(0.5)):
        assert time.monotonic() < end, "nothing came"
    return found[0]


def until(server: ZmqTransport, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        server.receive(0.02)


CHILD = """
import ctypes, sys
from kvstore.config import Config
from kvstore.zmq_transport import ZmqTransport
worker = ZmqTransport(Config(heartbeat=0.2, dead_after=3.0))
worker.connect("s", sys.argv[1])
worker.send("s", [b"hello"])
if sys.argv[2] == "hold":
    ctypes.PyDLL(None).usleep(2_500_000)  # unlike CDLL, keeps the interpreter lock
    worker.send("s", [b"done"])
while True:
    for _, frames in worker.receive(60):
        worker.send("s", frames)
"""


@contextlib.contextmanager
def child(endpoint: str, mode: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", CHILD, endpoint, mode])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_stopped_process_is_cut_off_and_comes_back(listen: Listen) -> None:
    server = listen(QUICK)
    with child(server.bind("tcp://127.0.0.1:0"), "echo") as process:
        node = first(server)[0]
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        until(server, lambda: not server.send(node, [b"x"]))
        assert time.monotonic() - began < QUICK.dead_after * 3  # by design half of it
        os.kill(process.pid, signal.SIGCONT)
        until(server, lambda: server.send(node, [b"again"]))
        assert first(server)[0] == node


def test_a_process_that_holds_the_interpreter_lock_stays_connected(listen: Listen) -> None:
    server = listen(QUICK)
    with child(server.bind("tcp://127.0.0.1:0"), "hold"):
        node = first(server)[0]
        got: list[tuple[str, list[Frame]]] = []
        while not got:
            assert server.send(node, [b"are you there"])
            got = server.receive(0.05)
        assert [bytes(frame) for frame in got[0][1]] == [b"done"]


def test_a_killed_process_is_noticed_at_once(listen: Listen) -> None:
    server = listen(Config(dead_after=60.0))  # heartbeats would tell after 30 s; the closed connection does earlier
    with child(server.bind("tcp://127.0.0.1:0"), "echo") as process:
        node = first(server)[0]
        process.kill()
        began = time.monotonic()
        until(server, lambda: not server.send(node, [b"x"]))
        assert time.monotonic() - began < 15
