"""A worker's machine: its membership in the job and its session with the servers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.config import Config
from kvstore.errors import KVStoreError, PeerLostError, from_wire
from kvstore.machine import SCHEDULER, Action, Connect, Send, server_address
from kvstore.member import Broken, Member, MemberState, PeerGone, Started
from kvstore.messages import Exited, Failed, Failure, Frame, Gone, Message, Role
from kvstore.operation import Operation, Part, abandon
from kvstore.session import Session


class WorkerMachine:
    """Messages of the scheduler about membership go to `member`, everything else to `session` (None before Start)."""

    def __init__(self, config: Config, member: Member) -> None:
        self.member = member
        self.session: Session | None = None
        self.error: KVStoreError | None = None
        self._config = config

    @property
    def finished(self) -> bool:
        """Left the job, or never was part of it. A broken worker goes on: its user has to be told."""
        return self.member.state is MemberState.LEFT

    def start(self, now: float) -> list[Action]:
        """Begin to join."""
        return self.member.start(now)

    def submit(self, operation: Operation, parts: Iterable[Part], now: float) -> list[Action]:
        """See `Session.submit`."""
        if self.session is None or self.error is not None:
            operation.fail(self.error or KVStoreError("the job has not started"))
            abandon(operation, parts)
            return []
        return self.session.submit(operation, parts, now)

    def leave(self, now: float) -> list[Action]:
        """Leave in good order; `finished` once the scheduler knows."""
        return self.member.leave(self.session.next_sequence() if self.session else 0, now)

    def abort(self) -> list[Action]:
        """Tell the scheduler that this process ends out of order, so that the others learn it at once."""
        if self.member.rank is None:
            return []
        return [Send(SCHEDULER, Exited(role=Role.WORKER, rank=self.member.rank, code=1))]

    def receive(self, sender: str, message: Message, frames: Sequence[Frame], now: float) -> list[Action]:
        """See `kvstore.machine.Machine`."""
        if sender == SCHEDULER and self.member.concerns(message):
            return [*self.member.receive(message, now), *self._follow()]
        if isinstance(message, Failed):
            self._learn_from(message.failure)
        return [*self._follow(), *(self.session.receive(sender, message, frames, now) if self.session else [])]

    def unreachable(self, to: str, now: float) -> list[Action]:
        """Connections of a worker queue what cannot be sent; nothing to do."""
        return []

    def tick(self, now: float) -> list[Action]:
        """See `kvstore.machine.Machine`."""
        actions = [*self.member.tick(now), *self._follow()]
        return actions + (self.session.tick(now) if self.session else [])

    def validate(self) -> None:
        """Check the invariants; used by tests after every step."""
        self.member.validate()
        if self.session:
            self.session.validate()

    def _learn_from(self, failure: Failure) -> None:
        """Whoever is told that a peer is lost finds it counted, also if the scheduler's roster is still on its way."""
        error = from_wire(failure.error, failure.text, failure.facts)
        if isinstance(error, PeerLostError) and error.role in tuple(Role) and isinstance(error.rank, int):
            self.member.learn_of(Gone(Role(error.role), error.rank, True, error.age or 0.0))

    def _follow(self) -> list[Action]:
        actions: list[Action] = []
        for event in self.member.take_events():
            match event:
                case Started(rank=rank, servers=servers):
                    self.session = Session(self._config, rank, len(servers))
                    actions += [Connect(server_address(number), server) for number, server in enumerate(servers)]
                case PeerGone(gone=Gone(role=Role.SERVER) as gone):
                    if self.session:
                        self.session.fail_server(gone.rank, _server_lost(gone))
                case PeerGone():
                    pass  # a lost worker: servers and scheduler end exactly the waits that need it
                case Broken(error=error):
                    self.error = error
                    if self.session:
                        self.session.fail_all(error)
        return actions


def _server_lost(gone: Gone) -> PeerLostError:
    how = f"ended with exit code {gone.exit_code}" if gone.exit_code is not None else "was lost"
    return PeerLostError(
        f"server {gone.rank} {how} (last heard of {gone.age:.1f} s before); the chunks it held are gone",
        role=Role.SERVER.value, rank=gone.rank, age=gone.age,
    )  # fmt: skip
