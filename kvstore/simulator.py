"""A whole cluster of machines in one process, on simulated time, with faults; everything follows from a seed.

    simulator = Simulator(seed=7, faults=Faults(disconnect=0.01, duplicate=0.01))
    simulator.add("scheduler", Membership(...), listen_as="memory://scheduler")
    simulator.add("worker-0", Session(...), connect={"scheduler": "memory://scheduler"})
    simulator.call("worker-0", lambda session: session.submit(..., simulator.now))
    simulator.run_until(lambda: done, limit=10.0)

Messages pass through the wire format. After each event the machine's `validate()` runs, if it has one. Whatever a
machine raises carries the seed and the last events as a note.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from kvstore.clock import SimulatedClock
from kvstore.dispatch import dispatch
from kvstore.machine import Action, Adopt, Connect, Machine, Send
from kvstore.memory_network import Faults, Network
from kvstore.memory_transport import MemoryTransport
from kvstore.messages import Frame, Message
from kvstore.wire import Wire

FLUSH = 1.0
"""Seconds that the last messages of a finished machine have to arrive."""
LINE = 220
"""Characters of a message that a line of the story shows."""

Chosen = Callable[[str, str, Message], bool]


@dataclass(eq=False)
class _Node:
    """One process: its machine, its wire and its transport. Passes on as a machine what `dispatch` decoded."""

    name: str
    machine: Any
    wire: Wire
    transport: MemoryTransport
    listen_as: str | None
    connect: Mapping[str, str]
    story: deque[_Event]
    lives: int
    stopped: bool = False
    ended: str = ""
    validate: Callable[[], object] = field(init=False)

    def __post_init__(self) -> None:
        self.validate = getattr(self.machine, "validate", lambda: None)

    @property
    def finished(self) -> bool:
        return bool(self.machine.finished)

    def receive(self, sender: str, message: Message, frames: Sequence[Frame], now: float) -> Iterable[Action]:
        self.story.append(_Event(now, self.transport.node, "<-", sender, message))
        actions: Iterable[Action] = self.machine.receive(sender, message, frames, now)
        return actions

    def unreachable(self, to: str, now: float) -> Iterable[Action]:
        actions: Iterable[Action] = self.machine.unreachable(to, now)
        return actions

    def tick(self, now: float) -> Iterable[Action]:
        actions: Iterable[Action] = self.machine.tick(now)
        return actions


@dataclass(frozen=True, slots=True)
class _Event:
    time: float
    node: str
    arrow: str = ""
    peer: str = ""
    message: Message | None = None

    def __str__(self) -> str:
        text = "" if self.message is None else repr(self.message)
        text = text if len(text) <= LINE else text[: LINE - 3] + "..."
        return f"{self.time:12.6f}  {' '.join(part for part in (self.node, self.arrow, self.peer, text) if part)}"


class Simulator:
    """Runs machines by name. A restarted process keeps its name and gets a new node id, as a real one does.

    Args:
        seed: of every random choice; the same calls with the same seed give the same `story`.
        faults: what the network does, see `Faults`.
        tick: mean seconds between two ticks of a machine; each one comes after 0.5 to 1.5 times this.
        start: the first time; not 0, as a machine must not take 0 for "now" or "never".
        remember: events kept for `story`.
    """

    def __init__(
        self,
        seed: int = 0,
        faults: Faults | None = None,
        *,
        tick: float = 0.25,
        start: float = 1000.0,
        remember: int = 100_000,
    ) -> None:
        self.seed = seed
        self.clock = SimulatedClock(start)
        self.network = Network(self.clock, faults or Faults(), seed)
        self.network.note = self._note
        self.random = self.network.random
        self._tick = tick
        self._nodes: dict[str, _Node] = {}
        self._story: deque[_Event] = deque(maxlen=remember)
        self._losses: list[Chosen] = []

    @property
    def now(self) -> float:
        """Simulated seconds."""
        return self.clock.now

    def add(
        self,
        name: str,
        machine: Machine,
        listen_as: str | None = None,
        connect: Mapping[str, str] | None = None,
        wire: Wire | None = None,
    ) -> None:
        """Start a process: `listen_as` is its own endpoint, `connect` gives the endpoints it connects to, by name."""
        if name in self._nodes:
            raise AssertionError(f"{name!r} was added before: use restart for a new process in its place")
        self._launch(name, 1, machine, listen_as, connect or {}, wire or Wire())

    def restart(self, name: str, machine: Machine, wire: Wire | None = None) -> None:
        """Start a new process in place of `name` (killed first if it lives), on the same endpoints."""
        old = self._nodes[name]
        self.kill(name)
        self._launch(name, old.lives + 1, machine, old.listen_as, old.connect, wire or Wire())

    def kill(self, name: str) -> None:
        """End a process as SIGKILL does: connections break, and what it had under way is lost."""
        self._end(self._nodes[name], "was killed", 0.0)

    def stop(self, name: str) -> None:
        """Stop a process as SIGSTOP does; its connections break after `Faults.silence`."""
        node = self._alive(name)
        self._note(f"{node.transport.node} was stopped")
        node.stopped = True
        self.network.freeze(node.transport.port, True)

    def resume(self, name: str) -> None:
        """Let a stopped process go on: it receives what waited in connections that still stand."""
        node = self._nodes[name]
        self._note(f"{node.transport.node} was resumed")
        node.stopped = False
        self.network.freeze(node.transport.port, False)

    def cut(self, a: str, b: str) -> None:
        """Let nothing pass between two processes; their connections break after `Faults.silence`."""
        self._note(f"{a} and {b} were cut off from each other")
        self.network.cut(a, b)

    def heal(self, a: str, b: str) -> None:
        """End a `cut`."""
        self._note(f"{a} and {b} can reach each other again")
        self.network.heal(a, b)

    def disconnect(self, name: str, to: str) -> None:
        """Break the standing connection of `name` to an address as `name` calls it; it is opened again."""
        if not self._alive(name).transport.sever(to):
            raise AssertionError(f"no connection from {name} to {to} stands")

    def lose(self, chosen: Chosen) -> None:
        """Lose the next message with chosen(sender's name, address, message), and its connection with it."""
        self._losses.append(chosen)

    def machine(self, name: str) -> Any:
        """Return the machine that runs, or ran last, under a name."""
        return self._nodes[name].machine

    @property
    def names(self) -> list[str]:
        """Every name that was added."""
        return list(self._nodes)

    def is_alive(self, name: str) -> bool:
        """False once a process has finished or was killed."""
        return not self._nodes[name].ended

    def call(self, name: str, method: Callable[[Any], Iterable[Action] | None]) -> None:
        """Do as user code does: call `method(machine)` now and perform the actions it returns.

        What it raises passes to the caller.
        """
        node = self._alive(name)
        self._event(node, lambda: method(node.machine))

    def at(self, time: float, action: Callable[..., object], *arguments: Any) -> None:
        """Run `action(*arguments)` at a simulated time, for example `at(now + 3, kill, 'server-1')`."""
        self.clock.at(time, action, *arguments)

    def run(self, seconds: float) -> None:
        """Let simulated time pass."""
        self.clock.advance(seconds)

    def run_until(self, predicate: Callable[[], bool], limit: float, what: str = "") -> None:
        """Run until `predicate()` holds, asked after each event.

        Raises:
            AssertionError: it does not hold after `limit` simulated seconds; the text gives the last events.
        """
        until = self.now + limit
        while not predicate():
            if not self.clock.step(until):
                if predicate():
                    return
                raise AssertionError(
                    f"{what or 'what was waited for'} did not happen within {limit} simulated seconds\n{self.story()}"
                )

    def story(self, last: int = 60) -> str:
        """Return the seed and the last events, one a line: time, node id, what it sent (->) or received (<-)."""
        events = list(islice(reversed(self._story), last))[::-1]
        return "\n".join([f"seed {self.seed}; the last {len(events)} events:", *map(str, events)])

    def _launch(
        self, name: str, lives: int, machine: Machine, listen_as: str | None, connect: Mapping[str, str], wire: Wire
    ) -> None:
        node_id = name if lives == 1 else f"{name}#{lives}"
        transport = MemoryTransport(self.network, node_id, lambda sender, got: self._arrive(node, sender, got), name)
        node = _Node(name, machine, wire, transport, listen_as, connect, self._story, lives)
        self._nodes[name] = node
        self._note(f"{node_id} started")
        if listen_as is not None:
            transport.bind(listen_as)
        for to, endpoint in connect.items():
            transport.connect(to, endpoint)
        self.clock.after(self.random.uniform(0.0, self._tick), self._tick_node, node)

    def _tick_node(self, node: _Node) -> None:
        if node.ended:
            return
        self.clock.after(self._tick * self.random.uniform(0.5, 1.5), self._tick_node, node)
        if not node.stopped:
            self._event(node, lambda: node.machine.tick(self.now))

    def _arrive(self, node: _Node, sender: str, frames: Sequence[Frame]) -> None:
        chosen = sender in node.transport.port.outbound
        self._event(node, lambda: dispatch(node, node.wire, sender, frames, self.now, chosen=chosen))

    def _event(self, node: _Node, produce: Callable[[], Iterable[Action] | None]) -> None:
        try:
            self._perform(node, list(produce() or ()))
            node.validate()
            finished = node.finished
        except Exception as error:
            error.add_note(f"in {node.transport.node} at {self.now:.6f}; {self.story()}")
            raise
        if finished and not node.ended:
            self._end(node, "finished", FLUSH)

    def _perform(self, node: _Node, actions: Iterable[Action]) -> None:
        pending = deque(actions)
        told: set[str] = set()  # as the loop does: asked once per peer, or a send in the answer would ask for ever
        while pending:
            match pending.popleft():
                case Send() as send:
                    if not self._send(node, send) and send.to not in told:
                        told.add(send.to)
                        pending.extend(node.machine.unreachable(send.to, self.now))
                case Connect(to, endpoint):
                    self._note(f"{node.transport.node} connects to {endpoint} as {to}")
                    node.transport.connect(to, endpoint)
                case Adopt(job):
                    node.wire = replace(node.wire, job=job)

    def _send(self, node: _Node, send: Send) -> bool:
        self._story.append(_Event(self.now, node.transport.node, "->", send.to, send.message))
        if not node.transport.send(send.to, node.wire.encode(send.message, send.frames)):
            self._note(f"{node.transport.node} cannot reach {send.to}")
            return False
        for chosen in self._losses:
            if chosen(node.name, send.to, send.message) and node.transport.sever(send.to):
                self._losses.remove(chosen)
                break
        return True

    def _end(self, node: _Node, how: str, flush: float) -> None:
        if not node.ended:
            self._note(f"{node.transport.node} {how}")
            node.ended = how
            node.transport.close(flush)

    def _alive(self, name: str) -> _Node:
        node = self._nodes[name]
        if node.ended or node.stopped:
            raise AssertionError(f"{name} {node.ended or 'was stopped'}\n{self.story()}")
        return node

    def _note(self, text: str) -> None:
        self._story.append(_Event(self.now, text))
