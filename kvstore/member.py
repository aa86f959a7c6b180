"""A worker's or server's own side of membership: joining, staying alive, learning who is out, leaving. Pure.

    joining --Start--> active --leave--> leaving --Ack--> left
       |                  |                  |
       +------------------+------------------+---refused, removed, scheduler silent--> failed

Used inside the worker's and the server's machine, which hands over what `concerns` this part, calls `tick`, and acts
on `take_events`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from kvstore.config import Config
from kvstore.errors import JoinError, KVStoreError, PeerLostError, ProtocolError, from_wire
from kvstore.machine import SCHEDULER, Action, Adopt, Connect, Send
from kvstore.messages import (
    Ack,
    Beat,
    Failed,
    Gone,
    Leave,
    Message,
    Probe,
    Register,
    Role,
    Roster,
    Start,
    Waiting,
)

CHECK_COMMAND = "kvstore-server check"


class MemberState(StrEnum):
    """Where this process stands in the job."""

    JOINING = "joining"
    ACTIVE = "active"
    LEAVING = "leaving"
    LEFT = "left"
    FAILED = "failed"


@dataclass(frozen=True)
class Started:
    """The job is complete; `servers`: endpoints by rank."""

    job: str
    rank: int
    servers: list[str]


@dataclass(frozen=True)
class PeerGone:
    """Another process of the job was lost or left. Told once for each."""

    gone: Gone


@dataclass(frozen=True)
class Broken:
    """This process is no part of the job any more, and will not be again."""

    error: KVStoreError


Event: TypeAlias = Started | PeerGone | Broken

JOINING, ACTIVE, LEAVING, LEFT, FAILED = MemberState
TRANSITIONS: Mapping[tuple[MemberState, type], MemberState] = {
    (JOINING, Waiting): JOINING,
    (JOINING, Start): ACTIVE,
    (JOINING, Failed): FAILED,
    (ACTIVE, Failed): FAILED,
    (LEAVING, Failed): FAILED,
    (LEAVING, Ack): LEFT,
    **{(JOINING, kind): JOINING for kind in (Roster, Probe)},
    # Start: an answer to a repeated Register. Waiting: overtaken by it. After the end, what was under way arrives.
    **{(state, kind): state for state in (ACTIVE, LEAVING, LEFT, FAILED) for kind in (Start, Waiting, Roster, Probe)},
    **{(state, kind): state for state in (LEFT, FAILED) for kind in (Failed, Ack)},
}
"""State after a message from the scheduler. A missing entry is a ProtocolError."""


class Member:
    """One process's membership in a job.

    Attributes:
        state, rank, job: as said; `rank` and `job` are None and '' until `Start`.
        servers: endpoints of the servers, by rank.
        gone: who is out, by (role, rank); the scheduler too, once it is lost.
        error: why the state is `failed`.
        waiting_text: what a joining process waits for, for people.
    """

    def __init__(
        self,
        config: Config,
        role: Role,
        *,
        endpoint: str = "",
        wanted_rank: int | None = None,
        pid: int = 0,
        host: str = "",
        scheduler: str = "",
    ) -> None:
        """`endpoint`: where this server listens. `scheduler`: its endpoint, where it is not the one of the settings."""
        self.config = config
        self.role = role
        self.scheduler = scheduler or _endpoint(config)
        self.state = MemberState.JOINING
        self.rank: int | None = None
        self.job = ""
        self.servers: list[str] = []
        self.gone: dict[tuple[Role, int], Gone] = {}
        self.error: KVStoreError | None = None
        self.waiting_text = f"no answer yet from the scheduler at {self.scheduler}"
        self._register = Register(
            role=role, endpoint=endpoint, rank=wanted_rank, pid=pid, host=host, num_workers=config.num_workers,
            num_servers=config.num_servers, chunk_elements=config.chunk_elements,
        )  # fmt: skip
        self._events: list[Event] = []
        self._answered = False
        self._deadline = math.inf
        self._silence = 0.0
        self._ticked = 0.0
        self._sent = -math.inf
        self._leave: Leave | None = None
        self._leave_sent = -math.inf

    @property
    def name(self) -> str:
        """'worker 1', or 'worker (host a, pid 7)' before the rank is known."""
        own = self._register
        return f"{self.role} (host {own.host}, pid {own.pid})" if self.rank is None else f"{self.role} {self.rank}"

    def num_dead(self, role: Role | None = None) -> int:
        """How many processes (of a role) were lost; those that left in good order do not count."""
        return sum(gone.lost and role in (None, gone.role) for gone in self.gone.values())

    def take_events(self) -> list[Event]:
        """Return what happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def concerns(self, message: Message) -> bool:
        """Is this message from the scheduler for this part, not an answer to somebody else's request?"""
        own = None if self._leave is None else self._leave.sequence
        match message:
            case Waiting() | Start() | Roster() | Probe():
                return True
            case Failed():
                return message.sequence is None or message.sequence == own
            case Ack():
                return own is not None and own in message.sequences
            case _:
                return False

    def start(self, now: float) -> list[Action]:
        """Begin to join."""
        self._ticked = self._sent = now
        self._deadline = now + self.config.timeout
        return [Connect(SCHEDULER, self.scheduler), Send(SCHEDULER, self._register)]

    def receive(self, message: Message, now: float) -> list[Action]:
        """Handle a message of the scheduler. Raises ProtocolError for one that has no place here."""
        if isinstance(message, Failed) and message.failure.error == ProtocolError.__name__ and self.state is ACTIVE:
            return []  # one message could not be read; that does not end the membership
        if not self.concerns(message) or (self.state, type(message)) not in TRANSITIONS:
            raise ProtocolError(f"{self.name} is {self.state}: unexpected {type(message).__name__} from the scheduler")
        self._answered, self._silence = True, 0.0
        before, self.state = self.state, TRANSITIONS[self.state, type(message)]
        if before in (LEFT, FAILED):
            return []
        match message:
            case Waiting() if self.state is JOINING:
                self.waiting_text = message.text
            case Start() if before is JOINING:
                return self._begin(message)
            case Roster():
                self._learn(message)
            case Failed():
                failure = message.failure
                self._break(from_wire(failure.error, failure.text, failure.facts))
        return []

    def tick(self, now: float) -> list[Action]:
        """Give signs of life, ask again for what was not answered, notice that the scheduler is gone."""
        # While this process itself stood still, it could not hear anybody: that time proves nothing.
        self._silence += min(max(0.0, now - self._ticked), self.config.heartbeat)
        self._ticked = now
        if self.state in (LEFT, FAILED):
            return []
        if self._answered and self._silence > self.config.dead_after:
            self._lose_scheduler()
            return []
        if self.state is JOINING and now >= self._deadline:
            self._break(self._join_error())
            return []
        return [Send(SCHEDULER, message) for message in self._due(now)]

    def learn_of(self, gone: Gone) -> None:
        """Another process is out; who tells does not matter. A server may do so before the scheduler's roster comes."""
        key = (gone.role, gone.rank)
        if key != (self.role, self.rank) and key not in self.gone:
            self.gone[key] = gone
            self._events.append(PeerGone(gone))

    def leave(self, sequence: int, now: float) -> list[Action]:
        """Leave in good order; done when `state` is left. Before the start there is nothing to wait for."""
        if self.state not in (JOINING, ACTIVE):
            return []
        self.state = LEFT if self.state is JOINING else LEAVING
        self._leave, self._leave_sent = Leave(sequence=sequence), now
        return [Send(SCHEDULER, self._leave)]

    def validate(self) -> None:
        """Check the invariants; raises AssertionError. For tests."""
        assert (self.state is FAILED) == (self.error is not None), (self.state, self.error)
        assert (self.rank is None) == (self.job == "") == (self.servers == []), (self.rank, self.job, self.servers)
        if self.state in (ACTIVE, LEAVING):
            assert len(self.servers) == self.config.num_servers
            assert self._register.rank in (None, self.rank), f"wanted {self._register.rank}, got {self.rank}"
            assert (self.role, self.rank) not in self.gone, "goes on although it was removed"
        if self.state is JOINING:
            assert self.rank is None
        assert all(key == (gone.role, gone.rank) for key, gone in self.gone.items())

    def _due(self, now: float) -> list[Message]:
        due: list[Message] = []
        if now - self._sent >= self.config.heartbeat:
            # Before Start the job's id may be unknown, and only Register is read without it: it serves as the beat.
            self._sent = now
            due.append(self._register if self.state is JOINING else Beat())
        if self._leave and now - self._leave_sent >= self.config.retry:
            self._leave_sent = now
            due.append(self._leave)
        return due

    def _begin(self, message: Start) -> list[Action]:
        self.rank, self.job, self.servers = message.rank, message.job, list(message.servers)
        self.waiting_text = ""
        self._events.append(Started(message.job, message.rank, self.servers))
        return [Adopt(message.job)]

    def _learn(self, roster: Roster) -> None:
        for gone in roster.gone:
            key = (gone.role, gone.rank)
            if key == (self.role, self.rank):
                self._learn_own(gone)
            else:
                self.learn_of(gone)

    def _learn_own(self, gone: Gone) -> None:
        if gone.lost:
            text = f"you were removed from the job: {self.name} was declared dead after {gone.age:.1f} s of silence"
            self._break(PeerLostError(text, role=str(gone.role), rank=gone.rank, age=gone.age))
        elif self.state is LEAVING:
            self.state = LEFT

    def _lose_scheduler(self) -> None:
        age = self._silence
        self.gone[Role.SCHEDULER, 0] = Gone(Role.SCHEDULER, 0, True, age)
        text = (
            f"the scheduler at {self.scheduler} is lost: {self.name} has not heard of it for {age:.1f} s "
            f"(limit {self.config.dead_after:g} s); the job cannot go on without it"
        )
        self._break(PeerLostError(text, role=str(Role.SCHEDULER), rank=0, age=age, address=self.scheduler))

    def _join_error(self) -> JoinError:
        if self._answered:
            reason = f"the scheduler at {self.scheduler} said last: {self.waiting_text}"
        else:
            reason = (
                f"nothing answered at {self.scheduler}, where the scheduler should be. Likely causes: it was not "
                "started or has ended; the host (DMLC_PS_ROOT_URI) is wrong or cannot be reached; the port "
                f"(DMLC_PS_ROOT_PORT) is wrong or closed by a firewall. To find out, run: {CHECK_COMMAND}"
            )
        text = f"{self.name} could not join the job within {self.config.timeout:g} s: {reason}"
        return JoinError(text, role=str(self.role), rank=self._register.rank, address=self.scheduler)

    def _break(self, error: KVStoreError) -> None:
        self.state, self.error = FAILED, error
        self._events.append(Broken(error))


def _endpoint(config: Config) -> str:
    host = f"[{config.root_uri}]" if ":" in config.root_uri else config.root_uri
    return f"tcp://{host}:{config.root_port}"
