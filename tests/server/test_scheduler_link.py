"""The launcher tells the scheduler who ended: in order, nothing lost, nothing blocking."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from kvstore.config import Config
from kvstore.machine import SCHEDULER
from kvstore.messages import Exited, Frame, Message, Role
from kvstore.server.scheduler_link import SchedulerLink, connect_scheduler
from kvstore.wire import Wire
from kvstore.zmq_transport import ZmqTransport

GONE = [Exited(role=Role.WORKER, rank=rank, code=-9) for rank in range(3)]


class Unreachable:
    """A transport whose connection does not stand yet."""

    node = ""

    def __init__(self) -> None:
        self.stands = False
        self.sent: list[Message] = []

    def bind(self, endpoint: str) -> str:
        return endpoint

    def connect(self, name: str, endpoint: str) -> None:
        self.connected = name, endpoint

    def send(self, to: str, frames: Sequence[Frame]) -> bool:
        if self.stands:
            self.sent.append(Wire("j").decode(frames)[0])
        return self.stands

    def receive(self, timeout: float) -> list[tuple[str, list[Frame]]]:
        assert timeout == 0.0
        return []

    def wake(self) -> None: ...

    def close(self, flush: float = 0.0) -> None:
        self.stands = False


def test_messages_wait_for_the_connection_and_keep_their_order() -> None:
    transport = Unreachable()
    link = SchedulerLink(transport, "tcp://127.0.0.1:1", "j")
    assert transport.connected == (SCHEDULER, "tcp://127.0.0.1:1")
    link.tell(GONE[0])
    link.tell(GONE[1])
    assert transport.sent == []
    transport.stands = True
    link.tell(GONE[2])
    link.tell()
    assert transport.sent == GONE


def test_over_a_real_connection() -> None:
    scheduler = ZmqTransport(Config())
    link = connect_scheduler(scheduler.bind("tcp://127.0.0.1:0"), "j")
    try:
        for message in GONE:
            link.tell(message)
        found: list[Message] = []
        deadline = time.monotonic() + 10
        while len(found) < len(GONE):
            assert time.monotonic() < deadline
            found += [Wire("j").decode(frames)[0] for _, frames in scheduler.receive(1.0)]
        assert found == GONE
    finally:
        link.close()
        scheduler.close()


@pytest.mark.parametrize("messages", [0, 3])
def test_closing_does_not_wait_for_a_dead_scheduler(messages: int) -> None:
    scheduler = ZmqTransport(Config())
    endpoint = scheduler.bind("tcp://127.0.0.1:0")
    scheduler.close()
    link = connect_scheduler(endpoint, "j")
    for message in GONE[:messages]:
        link.tell(message)
    began = time.monotonic()
    link.close()
    assert time.monotonic() - began < 5.0  # on a busy machine; a default of ZeroMQ's is to wait for ever
