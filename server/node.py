"""One server process: its part in the job's membership together with its shard, run over a transport."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import time
from collections.abc import Sequence

from kvstore.addresses import advertise, bind_endpoints, scheduler_endpoint
from kvstore.compression.kernels import warm_up
from kvstore.config import Config
from kvstore.errors import ConfigError, KVStoreError
from kvstore.loop import Loop
from kvstore.machine import SCHEDULER, Action, Send
from kvstore.member import Broken, Member, MemberState, PeerGone
from kvstore.messages import AskStatus, Frame, Message, Role, SetCompression, Status
from kvstore.server.malloc import tune_malloc
from kvstore.server.shard import Shard
from kvstore.server.stop import STOPPED, signals
from kvstore.wire import Wire
from kvstore.zmq_transport import ZmqTransport

log = logging.getLogger("kvstore.server")
LEAVE_SEQUENCE = 1
FLUSH = 2.0
"""Seconds for the last messages to leave at the end."""


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
        if isinstance(message, SetCompression):
            warm_up()  # a raw job never loads the kernels; ZeroMQ's own threads keep this process alive meanwhile
        if sender == SCHEDULER:
            return [*self.member.receive(message, now), *self._follow(now)]
        return self.shard.receive(sender, message, frames, now)

    def unreachable(self, to: str, now: float) -> list[Action]:
        """A worker's connection is down: it will ask again, or the scheduler will tell that it is lost."""
        return []

    def tick(self, now: float) -> list[Action]:
        """See `kvstore.machine.Machine`."""
        return [*self.member.tick(now), *self._follow(now), *self.shard.tick(now)]

    def validate(self) -> None:
        """Check the invariants; raises AssertionError. For tests."""
        self.member.validate()
        self.shard.validate()

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
            "dropped_pushes": self.shard.staleness.dropped,
            "scaled_pushes": self.shard.staleness.scaled,
        }
        return Status(
            sequence=message.sequence, role=Role.SERVER, rank=self.member.rank or 0, job=self.member.job,
            num_workers=self._config.num_workers, num_servers=self._config.num_servers,
            keys=keys if message.keys else [], totals=totals,
            optimizer=self.shard.optimizer, compression=self.shard.compression,
            staleness=self.shard.staleness.histogram(),
        )  # fmt: skip


def run_server(config: Config, *, imports: Sequence[str] = ()) -> int:
    """Serve until all workers are gone; blocks. Belongs to the main thread, whose SIGTERM and SIGINT end it.

    Args:
        config: `role` is server.
        imports: modules that register own optimizers or codecs.

    Returns:
        0 when the job is over, 1 when this server could not join or lost the job, 128 + n for signal n.

    Raises:
        ConfigError: a module does not import. AddressError: the address cannot be used.
    """
    tune_malloc()
    import_modules(imports)
    transport = ZmqTransport(config)
    try:
        with signals(transport) as stop:
            endpoint = advertise(config, [transport.bind(wanted) for wanted in bind_endpoints(config)])
            member = Member(
                config, Role.SERVER, endpoint=endpoint, wanted_rank=config.server_id, pid=os.getpid(),
                host=socket.gethostname(), scheduler=scheduler_endpoint(config),
            )  # fmt: skip
            machine = ServerMachine(config, member)
            wire = Wire(config.job, config.limits, config.checksum)
            loop = Loop(machine, transport, wire, tick_every=min(0.1, config.heartbeat / 4))
            loop.perform(machine.start(time.monotonic()))
            loop.run(stop)
            if machine.error is not None:
                return 1
            return STOPPED + stop.signal if stop.is_set() else 0
    finally:
        transport.close(flush=FLUSH)


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
