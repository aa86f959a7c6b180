"""What a transport is. `zmq_transport` carries real jobs, `memory_transport` the simulator's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.messages import Frame


class Transport(Protocol):
    """Messages (lists of frames) between processes, in order per pair of processes, each whole or not at all.

    A transport has one node id. Peers that connected to us are addressed by their node id; peers we connected to,
    by the name given to `connect`. It belongs to one thread, but for `wake`.
    """

    node: str

    def bind(self, endpoint: str) -> str:
        """Listen; return the real endpoint (port chosen). Raises AddressError naming the address and what to set."""
        ...

    def connect(self, name: str, endpoint: str) -> None:
        """Connect, or reconnect the name to another endpoint; succeeds at once, even if nobody listens yet."""
        ...

    def send(self, to: str, frames: Sequence[Frame]) -> bool:
        """Queue a message without copying large frames; False if no connection to `to` stands. Never blocks."""
        ...

    def receive(self, timeout: float) -> list[tuple[str, list[Frame]]]:
        """Return what has arrived, waiting up to `timeout` seconds for a first message or a `wake`."""
        ...

    def wake(self) -> None:
        """Make a waiting `receive` return. May be called from any thread."""
        ...

    def close(self, flush: float = 0.0) -> None:
        """Close; give queued messages `flush` seconds to leave. Never hangs."""
        ...
