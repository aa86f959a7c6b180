"""The launcher's connection to the scheduler, over which it tells of processes that ended."""

from __future__ import annotations

from collections import deque

from kvstore.config import Config
from kvstore.machine import SCHEDULER
from kvstore.messages import Exited
from kvstore.transport import Transport
from kvstore.wire import Wire


class SchedulerLink:
    """Sends messages in order; those that cannot be sent yet wait for the next call."""

    def __init__(self, transport: Transport, endpoint: str, job: str) -> None:
        self._transport, self._wire = transport, Wire(job)
        self._waiting: deque[Exited] = deque()
        transport.connect(SCHEDULER, endpoint)

    def tell(self, message: Exited | None = None) -> None:
        """Send `message`, and before it whatever could not be sent yet. Never blocks."""
        if message is not None:
            self._waiting.append(message)
        self._transport.receive(0.0)  # answers are of no use here, but must not pile up
        while self._waiting and self._transport.send(SCHEDULER, self._wire.encode(self._waiting[0])):
            self._waiting.popleft()

    def close(self) -> None:
        """Close at once: when a launch is over, nobody is left to read."""
        self._transport.close()


def connect_scheduler(endpoint: str, job: str) -> SchedulerLink:
    """Connect to the scheduler of `job` at `endpoint`, as it told it."""
    from kvstore.zmq_transport import ZmqTransport

    return SchedulerLink(ZmqTransport(Config()), endpoint, job)
