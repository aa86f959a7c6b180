"""What every part that decides looks like: pure, without sockets, threads or clocks.

A machine takes (message, now) and returns what to send. `kvstore.loop` runs one over a transport;
`kvstore.simulator` runs a whole cluster of them in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.messages import Frame, Message

SCHEDULER = "scheduler"
"""Address of the scheduler as seen from workers and servers."""


def server_address(rank: int) -> str:
    """Address of a server as seen from workers: 'server-0', 'server-1', ..."""
    return f"server-{rank}"


@dataclass(frozen=True)
class Send:
    """Send `message` and its payload frames to an address. The frames must not change afterwards."""

    to: str
    message: Message
    frames: Sequence[Frame] = ()


@dataclass(frozen=True)
class Connect:
    """Open a connection to `endpoint` and call it `to` from now on."""

    to: str
    endpoint: str


@dataclass(frozen=True)
class Adopt:
    """From now on, read and write messages of this job only."""

    job: str


Action = Send | Connect | Adopt


class Machine(Protocol):
    """A participant of the cluster. Addresses: names given at Connect, or the node id of whoever connected to us."""

    @property
    def finished(self) -> bool:
        """True once the process may end; the shell stops then."""
        ...

    def receive(self, sender: str, message: Message, frames: Sequence[Frame], now: float) -> Iterable[Action]:
        """Handle a message; `frames` may be kept (nobody writes to them). Raises KVStoreError for a bad request."""
        ...

    def unreachable(self, to: str, now: float) -> Iterable[Action]:
        """A message could not be sent because no connection to that address stands."""
        ...

    def tick(self, now: float) -> Iterable[Action]:
        """Called several times per heartbeat: deadlines, retries, beats. `now`: seconds, monotonic."""
        ...
