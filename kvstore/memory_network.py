"""The network of the memory transport: connections, what can go wrong with them, and when messages arrive.

A connection keeps the order of its messages in each direction. It loses messages only by breaking, and then all that
are under way in both directions; whoever opened it opens it again. While it is down, the side that opened it queues
(as a ZeroMQ DEALER does) and the other side is told that it cannot send (as a mandatory ROUTER does).
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.clock import SimulatedClock
from kvstore.messages import Frame

Deliver = Callable[[str, list[Frame]], object]


@dataclass(frozen=True)
class Faults:
    """What the network does to messages. Probabilities are per message; times in seconds."""

    delay: tuple[float, float] = (0.0002, 0.002)
    """Shortest and longest time a message takes; messages of different connections overtake each other."""
    stall: float = 0.0
    """Probability that a message, and with it all behind it on its connection, takes up to `stall_seconds` longer."""
    stall_seconds: float = 1.0
    disconnect: float = 0.0
    """Probability that the connection breaks instead of taking the message."""
    duplicate: float = 0.0
    """Probability that a message arrives twice."""
    reconnect: float = 0.1
    """Time between attempts to open a connection."""
    silence: float = 3.0
    """A connection to a process that is stopped or cut off breaks after this time; until then messages wait in it."""


@dataclass(eq=False)
class Port:
    """One node's end of the network: what it opened by name, and who opened a connection to it by node id."""

    node: str
    host: str
    deliver: Deliver
    outbound: dict[str, Link] = field(default_factory=dict)
    inbound: dict[str, Link] = field(default_factory=dict)
    frozen: bool = False
    closed: bool = False


@dataclass(frozen=True)
class Parcel:
    """A message under way and the checksums of its frames when it was sent."""

    frames: Sequence[Frame]
    checksums: tuple[int, ...]


@dataclass(eq=False)
class Link:
    """A connection that `connector` opened to `endpoint` as `name`. `life` counts its ups and downs."""

    connector: Port
    name: str
    endpoint: str
    acceptor: Port | None = None
    wanted: bool = True
    life: int = 0
    queue: deque[Parcel] = field(default_factory=deque)
    held: list[tuple[bool, Parcel]] = field(default_factory=list)
    busy_until: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    blocked_since: float | None = None


class Network:
    """Every port of one simulated network. Deterministic: the same calls and seed give the same events."""

    def __init__(self, clock: SimulatedClock | None = None, faults: Faults = Faults(), seed: int = 0) -> None:
        self.clock = clock or SimulatedClock()
        self.faults = faults
        self.random = random.Random(seed)
        self.endpoints: dict[str, Port] = {}
        self.note: Callable[[str], object] = lambda text: None
        self._links: dict[int, Link] = {}
        self._cuts: set[frozenset[str]] = set()

    def open(self, port: Port, name: str, endpoint: str) -> None:
        """Open a connection, in place of an older one of that name. It stands when `endpoint` is first reached."""
        if name in port.outbound:
            self._discard(port.outbound[name])
        link = port.outbound[name] = Link(port, name, endpoint)
        self._links[id(link)] = link
        self.clock.after(self.random.uniform(*self.faults.delay), self._attempt, link, link.life)

    def transmit(self, link: Link, outward: bool, parcel: Parcel) -> None:
        """Put a message on a standing connection, `outward` from the one who opened it."""
        faults, chance = self.faults, self.random.random
        if faults.disconnect and chance() < faults.disconnect:
            self.sever(link)
            return
        delay = self.random.uniform(*faults.delay)
        if faults.stall and chance() < faults.stall:
            delay += self.random.uniform(0.0, faults.stall_seconds)
        due = link.busy_until[outward] = max(link.busy_until[outward], self.clock.now + delay)
        for _ in range(2 if faults.duplicate and chance() < faults.duplicate else 1):
            self.clock.at(due, self._arrive, link, link.life, outward, parcel)

    def sever(self, link: Link) -> None:
        """Break a connection: what is under way is lost; it is opened again later if its opener still lives."""
        if link.acceptor is not None:
            self.note(f"{link.connector.node} -x- {link.acceptor.node}  connection broke")
            if link.acceptor.inbound.get(link.connector.node) is link:
                del link.acceptor.inbound[link.connector.node]
        link.acceptor, link.blocked_since = None, None
        link.held.clear()
        link.life += 1
        if link.wanted:
            self.clock.after(self.faults.reconnect * self.random.uniform(0.5, 1.5), self._attempt, link, link.life)

    def shut(self, port: Port, flush: float) -> None:
        """Take a port off the network; what it sent still has `flush` seconds to arrive."""
        port.closed = True
        self.endpoints = {endpoint: owner for endpoint, owner in self.endpoints.items() if owner is not port}
        links = [*port.outbound.values(), *port.inbound.values()]
        port.outbound, port.inbound = {}, {}
        if flush > 0:
            self.clock.after(flush, self._part, port, links)
        else:
            self._part(port, links)

    def freeze(self, port: Port, frozen: bool) -> None:
        """Stop (as SIGSTOP does) or resume a process: meanwhile nothing is handed to it, and it opens nothing."""
        port.frozen = frozen
        self._review()

    def cut(self, a: str, b: str) -> None:
        """Let nothing pass between two hosts, silently, until `heal`."""
        self._cuts.add(frozenset((a, b)))
        self._review()

    def heal(self, a: str, b: str) -> None:
        """End a `cut`; connections that have not broken yet hand over what waited in them."""
        self._cuts.discard(frozenset((a, b)))
        self._review()

    def _attempt(self, link: Link, life: int) -> None:
        if not link.wanted or link.life != life:
            return
        acceptor = self.endpoints.get(link.endpoint)
        if acceptor is None or acceptor.frozen or link.connector.frozen or self._is_cut(link.connector, acceptor):
            self.clock.after(self.faults.reconnect, self._attempt, link, life)
            return
        older = acceptor.inbound.get(link.connector.node)
        if older is not None:
            self._discard(older)
        link.acceptor, link.life = acceptor, life + 1
        link.busy_until = {True: 0.0, False: 0.0}
        acceptor.inbound[link.connector.node] = link
        self.note(f"{link.connector.node} --- {acceptor.node}  connected")
        while link.queue and link.acceptor is not None:
            self.transmit(link, True, link.queue.popleft())

    def _arrive(self, link: Link, life: int, outward: bool, parcel: Parcel) -> None:
        if link.life != life or link.acceptor is None:
            return  # the connection broke while the message was under way
        receiver = link.acceptor if outward else link.connector
        if receiver.frozen or self._is_cut(link.connector, link.acceptor):
            link.held.append((outward, parcel))
        else:
            self._hand_over(link, receiver, outward, parcel)

    def _hand_over(self, link: Link, receiver: Port, outward: bool, parcel: Parcel) -> None:
        sender = link.connector.node if outward else link.name
        for index, (frame, checksum) in enumerate(zip(parcel.frames, parcel.checksums, strict=True)):
            if zlib.crc32(frame) != checksum:
                raise AssertionError(
                    f"frame {index} of a message from {sender} to {receiver.node} was changed after it was sent: "
                    f"frames must not be written to, nor their memory used again, once handed to send"
                )
        if not receiver.closed:
            receiver.deliver(sender, [bytes(frame) for frame in parcel.frames])

    def _review(self) -> None:
        """After a freeze, cut, or their end: start to wait in connections that are blocked, go on in the others."""
        for link in list(self._links.values()):
            if link.acceptor is None:
                continue
            blocked = link.acceptor.frozen or link.connector.frozen or self._is_cut(link.connector, link.acceptor)
            if blocked and link.blocked_since is None:
                link.blocked_since = self.clock.now
                self.clock.after(self.faults.silence, self._give_up, link, self.clock.now, link.life)
            elif not blocked and link.blocked_since is not None:
                link.blocked_since = None
                self._release(link)

    def _release(self, link: Link) -> None:
        held, link.held = link.held, []
        life = link.life
        for outward, parcel in held:
            self._arrive(link, life, outward, parcel)

    def _give_up(self, link: Link, since: float, life: int) -> None:
        if link.blocked_since == since and link.life == life:
            self.sever(link)

    def _part(self, port: Port, links: list[Link]) -> None:
        for link in links:
            if link.connector is port:
                self._discard(link)
            elif link.acceptor is port:
                self.sever(link)

    def _discard(self, link: Link) -> None:
        link.wanted = False
        self._links.pop(id(link), None)
        self.sever(link)

    def _is_cut(self, a: Port, b: Port) -> bool:
        return bool(self._cuts) and frozenset((a.host, b.host)) in self._cuts
