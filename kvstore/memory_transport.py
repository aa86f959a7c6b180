"""The transport `memory://name`: within one process, in simulated time, for tests and the simulator."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from kvstore.errors import AddressError
from kvstore.memory_network import Deliver, Link, Network, Parcel, Port
from kvstore.messages import Frame

SCHEME = "memory://"


class MemoryTransport:
    """A `kvstore.transport.Transport` on a `Network`. All transports of a network belong to one thread.

    Args:
        node: node id, unique among the living nodes of the network.
        deliver: called as deliver(sender, frames) with what arrives; without it, `receive` returns what arrived.
        host: where the node runs, for `Network.cut`; the node id if not given.
    """

    def __init__(self, network: Network, node: str, deliver: Deliver | None = None, host: str | None = None) -> None:
        self.node = node
        self._network = network
        self._inbox: list[tuple[str, list[Frame]]] = []
        self._woken = False
        self.port = Port(node, host or node, deliver or (lambda sender, frames: self._inbox.append((sender, frames))))

    def bind(self, endpoint: str) -> str:
        """Listen on 'memory://name'; 'memory://*' takes the node id as name.

        Raises:
            AddressError: another scheme, an empty name, or a name somebody listens on.
        """
        if endpoint == SCHEME + "*":
            endpoint = SCHEME + self.node
        _check(endpoint)
        if endpoint in self._network.endpoints:
            owner = self._network.endpoints[endpoint].node
            raise AddressError(f"{endpoint} is in use by {owner}: choose another name", address=endpoint)
        self._network.endpoints[endpoint] = self.port
        return endpoint

    def connect(self, name: str, endpoint: str) -> None:
        """Connect, or reconnect the name to another endpoint; succeeds at once, even if nobody listens yet."""
        _check(endpoint)
        self._network.open(self.port, name, endpoint)

    def send(self, to: str, frames: Sequence[Frame]) -> bool:
        """Send; False if no connection to `to` stands. To a name of `connect` that is down, queue until it stands.

        Frames are not copied; whoever changes one before it has arrived gets an AssertionError at its arrival.
        """
        link, outward = self._link(to)
        if link is None:
            return False
        parcel = Parcel(frames, tuple(zlib.crc32(frame) for frame in frames))
        if link.acceptor is None:
            link.queue.append(parcel)
        else:
            self._network.transmit(link, outward, parcel)
        return True

    def receive(self, timeout: float) -> list[tuple[str, list[Frame]]]:
        """Return what has arrived, letting simulated time pass (up to `timeout` seconds) until something does."""
        until = self._network.clock.now + timeout
        while not self._inbox and not self._woken and self._network.clock.step(until):
            pass
        self._woken = False
        arrived, self._inbox = self._inbox, []
        return arrived

    def wake(self) -> None:
        """Make the current or next `receive` return. May be called from any thread."""
        self._woken = True

    def close(self, flush: float = 0.0) -> None:
        """Leave the network; what was sent still has `flush` simulated seconds to arrive."""
        if not self.port.closed:
            self._network.shut(self.port, flush)

    def sever(self, to: str) -> bool:
        """Break the connection to `to`, losing all that is under way in it; False if none stands. For tests."""
        link, _ = self._link(to)
        if link is None or link.acceptor is None:
            return False
        self._network.sever(link)
        return True

    def _link(self, to: str) -> tuple[Link | None, bool]:
        link = self.port.outbound.get(to)
        return (link, True) if link is not None else (self.port.inbound.get(to), False)


def _check(endpoint: str) -> None:
    if not endpoint.startswith(SCHEME) or endpoint == SCHEME:
        raise AddressError(f"{endpoint!r} is not an address of this transport: use 'memory://name'", address=endpoint)
