"""One server process: its part in the job's membership together with its shard, run over a transport."""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Callable, Sequence

from kvstore.config import Config
from kvstore.errors import ConfigError, KVStoreError
from kvstore.machine import SCHEDULER, Action, Send
from kvstore.member import Broken, Member, MemberState, PeerGone
from kvstore.messages import AskStatus, Frame, Message, Role, Status
from kvstore.server.shard import Shard

log = logging.getLogger("kvstore.server")
LEAVE_SEQUENCE = 1


class ServerMachine:
    """Pure: messages of the scheduler go to the member, those of workers to the shard. Ends when all workers have."""

    def __init__(self, config: Config, member: Member) -> None:
        self.member = member
        self.shard = Shard(config, config.num_workers)
        self._config = config

    @property
    def finished(self) -> bool:
        """Left, or the job is over without us."""
        return self.member.state in (MemberState.LEFT, MemberState.FAILED)

    @property
    def error(self) -> KVStoreError | None:
        """Why this server failed; None if it ended in good order."""
        return self.member.error

    def start(self, now: float) -> list[Action]:
        """Begin to join."""
        return self.member.start(now)

    def receive(self, sender: str, message: Message, frames: Sequence[Frame], now: float) -> list[Action]:
        """See `kvstore.machine.Machine`."""
        if isinstance(message, AskStatus):
            return [Send(sender, self._status(message))]
        if sender == SCHEDULER:
            return [*self.member.receive(message, now), *self._follow(now)]
        return self.shard.receive(sender, message, frames, now)

    def unreachable(self, to: str, now: float) -> list[Action]:
        """A worker's connection is down: it will ask again, or the scheduler will tell that it is lost."""
        return []

    def tick(self, now: float) -> list[Action]:
        """See `kvstore.machine.Machine`."""
        return [*self.member.tick(now), *self._follow(now), *self.shard.tick(now)]

    def _follow(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for event in self.member.take_events():
            match event:
                case PeerGone(gone=gone):
                    actions += self.shard.peer_gone(gone)
                case Broken(error=error):
                    log.error("%s ends: %s", self.member.name, error)
        workers_gone = sum(role == Role.WORKER for role, _ in self.member.gone)
        if workers_gone == self._config.num_workers and self.member.state is MemberState.ACTIVE:
            actions += self.member.leave(LEAVE_SEQUENCE, now)
        return actions

    def _status(self, message: AskStatus) -> Status:
        keys = self.shard.keys()
        totals: dict[str, int | float] = {
            "keys": len(keys),
            "elements": sum(key.elements for key in keys),
            "raw_bytes": sum(key.raw_bytes for key in keys),
            "received_bytes": sum(key.received_bytes for key in keys),
            "rounds": max((key.rounds for key in keys), default=0),
        }
        return Status(
            sequence=message.sequence, role=Role.SERVER, rank=self.member.rank or 0, job=self.member.job,
            num_workers=self._config.num_workers, num_servers=self._config.num_servers,
            keys=keys if message.keys else [], totals=totals,
            optimizer=self.shard.optimizer, compression=self.shard.compression,
        )  # fmt: skip


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register own optimizers or codecs. Named by whoever starts the server, never by the wire.

    Raises:
        ConfigError: a module does not import; names it and the reason.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # foreign code: whatever it raises, the user wants its name and reason
            raise ConfigError(f"--import {name}: {type(error).__name__}: {error}") from error
