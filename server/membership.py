"""The scheduler's decisions: who is in the job, who is out, and what all workers must do together. Pure: see `Machine`.

A process is lost when it has been silent for longer than `dead_after` AND no message can be sent to it. Silence alone
means nothing (code that holds Python's lock keeps a process from beating, but ZeroMQ's threads keep its connection
up), and neither does a broken connection (networks come back). Silent processes get a `Probe` every heartbeat to
find out. A launcher's `Exited` needs no such proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import assert_never

from kvstore.config import Config
from kvstore.errors import KVStoreError, PeerLostError, ProtocolError, to_wire
from kvstore.machine import Action, Send
from kvstore.messages import (
    Ack,
    Agree,
    AskStatus,
    Barrier,
    Beat,
    Exited,
    Failed,
    Failure,
    Frame,
    Gone,
    Leave,
    Message,
    Probe,
    ProcessStatus,
    Register,
    Role,
    Roster,
    Start,
    Status,
    Waiting,
)
from kvstore.server.admission import count, missing_text, ranks, refusal
from kvstore.server.collective import Answer, Collective
from kvstore.server.processes import TRANSITIONS, Process, State

WAITING_EVERY = 2.0
"""Seconds between two `Waiting` messages with the same text."""
LINGER = 5.0
"""Seconds the scheduler stays for servers that have not left after the last worker is gone."""


class Membership:
    """The scheduler of one job. `processes`: by node id, in the order they registered."""

    def __init__(self, config: Config, job: str) -> None:
        self.config = config
        self.job = job
        self.started = False
        self.processes: dict[str, Process] = {}
        self._collective = Collective(config.num_workers)
        self._told = ""
        self._told_at = -math.inf
        self._workers_gone_at = math.inf
        self._lingered = False

    @property
    def finished(self) -> bool:
        """All workers and servers are gone, or the servers did not leave within `LINGER` of the last worker."""
        return self.started and (self._lingered or not self._live())

    @property
    def gone(self) -> list[Gone]:
        """Everyone who left or was lost after the start."""
        return [process.gone for process in self.processes.values() if process.gone]

    def receive(self, sender: str, message: Message, frames: Sequence[Frame], now: float) -> Iterable[Action]:
        """See `Machine`. A refused process gets `Failed`; a message out of place raises ProtocolError."""
        match message:
            case AskStatus():
                return [Send(sender, self._status(message.sequence, now))]
            case Exited():
                return self._exited(message, now)
            case Register() | Beat() | Leave() | Barrier() | Agree():
                return self._receive_member(sender, message, now)
            case _:
                raise ProtocolError(f"the scheduler takes no message of type {type(message).__name__}")

    def unreachable(self, to: str, now: float) -> Iterable[Action]:
        """See `Machine`. Only noted here; `tick` draws the conclusion."""
        if to in self.processes:
            self.processes[to].reachable = False
        return []

    def tick(self, now: float) -> Iterable[Action]:
        """See `Machine`: gives up the dead, probes the silent, settles the overdue, tells joiners who is missing."""
        dead = [process for process in self._live() if self._is_dead(process, now)]
        actions = self._remove(dead, Probe, now) + self._probe(now)
        actions += self._answers(self._collective.tick(now))
        if now - self._workers_gone_at >= LINGER:
            self._lingered = True
        return actions + self._tell_joiners(now)

    def abandon(self, reason: str) -> list[Action]:
        """The scheduler ends before the job is over: everybody is told now, not after `dead_after`."""
        text = f"the scheduler of the job ended before the job did: {reason}"
        error = PeerLostError(text, role=str(Role.SCHEDULER), rank=0, age=0.0)
        return [_failed(process.node, error) for process in self._live()]

    def _receive_member(
        self, sender: str, message: Register | Beat | Leave | Barrier | Agree, now: float
    ) -> list[Action]:
        process = self.processes.get(sender)
        if process and process.state is State.LOST:
            return [_failed(sender, self._removal(process), getattr(message, "sequence", None))]
        if process is None and not isinstance(message, Register):
            raise ProtocolError("this scheduler does not know the sender: was the scheduler restarted during the job?")
        state = process.state if process else State.ABSENT
        if (state, type(message)) not in TRANSITIONS:
            raise ProtocolError(f"a process that is {state} may not send {type(message).__name__}")
        if process is None:
            assert isinstance(message, Register)
            return self._join(sender, message, now)
        process.hear(now)
        match message:
            case Register():
                return [Send(sender, self._start_of(process))] if process.rank is not None else []
            case Beat():
                return [Send(sender, Roster(gone=self.gone))]
            case Leave():
                return [Send(sender, Ack(sequences=[message.sequence])), *self._remove([process], Leave, now)]
            case Barrier() | Agree():
                return self._call(process, message, now)
            case _:
                assert_never(message)

    # --- coming ----------------------------------------------------------------------------------------------------

    def _join(self, sender: str, message: Register, now: float) -> list[Action]:
        error = refusal(self.config, self.processes.values(), self.started, message)
        if error:
            return [_failed(sender, error)]
        self.processes[sender] = Process(
            node=sender, role=message.role, wanted=message.rank, endpoint=message.endpoint,
            host=message.host, pid=message.pid, last_heard=now,
        )  # fmt: skip
        complete = len(self.processes) == self.config.num_workers + self.config.num_servers
        return self._start_job() if complete else []

    def _start_job(self) -> list[Action]:
        self.started = True
        for role in (Role.SERVER, Role.WORKER):
            for node, rank in ranks(self.config, self.processes.values(), role).items():
                process = self.processes[node]
                process.rank = rank
                process.state = TRANSITIONS[process.state, Start]
        return [Send(node, self._start_of(process)) for node, process in self.processes.items()]

    def _start_of(self, process: Process) -> Start:
        assert process.rank is not None
        servers = {other.rank: other.endpoint for other in self.processes.values() if other.role is Role.SERVER}
        return Start(job=self.job, rank=process.rank, servers=[servers[rank] for rank in range(len(servers))])

    def _tell_joiners(self, now: float) -> list[Action]:
        # Only at a tick: told at every arrival, a job of n processes would start with n * n messages.
        text = "" if self.started else missing_text(self.config, self.processes.values())
        if not text or (text == self._told and now - self._told_at < WAITING_EVERY):
            return []
        self._told, self._told_at = text, now
        return [Send(process.node, Waiting(text=text)) for process in self._live()]

    # --- going -----------------------------------------------------------------------------------------------------

    def _live(self) -> list[Process]:
        return [process for process in self.processes.values() if process.live]

    def _is_dead(self, process: Process, now: float) -> bool:
        # Dropping a joiner costs nothing: if it lives, its next Register brings it back. So its place is freed early.
        patience = self.config.dead_after if process.state is State.ACTIVE else 0.0
        return not process.reachable and now - process.last_heard > patience

    def _probe(self, now: float) -> list[Action]:
        beat = self.config.heartbeat
        silent = [
            process
            for process in self._live()
            if process.reachable and now - process.last_heard > 2 * beat and now - process.probed >= beat
        ]
        for process in silent:
            process.probed = now
        return [Send(process.node, Probe()) for process in silent]

    def _exited(self, message: Exited, now: float) -> list[Action]:
        asked = (message.role, message.rank)
        ended = [process for process in self._live() if (process.role, _number(process)) == asked]
        return self._remove(ended, Exited, now, message.code)

    def _remove(
        self, processes: list[Process], why: type[Message], now: float, code: int | None = None
    ) -> list[Action]:
        """Move processes out of the job and tell everybody; repeated for one that is out already, it does nothing."""
        answers: list[Answer] = []
        removed = [process for process in processes if process.live]
        for process in removed:
            process.state = TRANSITIONS[process.state, why]
            if process.state is State.ABSENT:
                del self.processes[process.node]
                continue
            assert process.rank is not None
            lost, age = process.state is State.LOST, max(0.0, now - process.last_heard)
            process.gone = Gone(process.role, process.rank, lost, age if lost else 0.0, code)
            if process.role is Role.WORKER:
                answers += self._collective.depart(process.gone)
        if not removed or not self.started:
            return []
        if not any(process.role is Role.WORKER for process in self._live()):
            self._workers_gone_at = min(self._workers_gone_at, now)
        roster = Roster(gone=self.gone)
        return [Send(process.node, roster) for process in self._live()] + self._answers(answers)

    def _removal(self, process: Process) -> PeerLostError:
        gone = process.gone
        assert gone is not None
        if gone.exit_code is None:
            reason = f"it was silent for {gone.age:.1f} s and could not be reached (limit {self.config.dead_after:g} s)"
        else:
            reason = f"its launcher saw it end with exit code {gone.exit_code}"
        text = f"you were removed from the job: {gone.role} {gone.rank} was declared dead because {reason}"
        return PeerLostError(text, role=str(gone.role), rank=gone.rank, age=gone.age)

    # --- together --------------------------------------------------------------------------------------------------

    def _call(self, process: Process, message: Barrier | Agree, now: float) -> list[Action]:
        if process.role is not Role.WORKER or process.rank != message.rank:
            raise ProtocolError(f"{process.describe()} called for worker {message.rank}")
        return self._answers(self._collective.call(message, now))

    def _answers(self, answers: list[Answer]) -> list[Action]:
        nodes = {process.rank: process.node for process in self._live() if process.role is Role.WORKER}
        return [Send(nodes[rank], message) for rank, message in answers if rank in nodes]

    # --- inspection ------------------------------------------------------------------------------------------------

    def _status(self, sequence: int, now: float) -> Status:
        expected = {
            node: rank
            for role in (Role.SERVER, Role.WORKER)
            for node, rank in ranks(self.config, self.processes.values(), role).items()
        }
        processes = [
            ProcessStatus(
                process.role, expected[node] if process.rank is None else process.rank, str(process.state),
                max(0.0, now - process.last_heard), process.endpoint, process.host, process.pid,
            )
            for node, process in self.processes.items()
        ]  # fmt: skip
        return Status(
            sequence=sequence, role=Role.SCHEDULER, rank=0, job=self.job, processes=processes,
            num_workers=self.config.num_workers, num_servers=self.config.num_servers,
        )  # fmt: skip

    def validate(self) -> None:
        """Check the invariants; raises AssertionError. For tests."""
        self._collective.validate()
        for role in (Role.SERVER, Role.WORKER):
            members = [process for process in self.processes.values() if process.role is role]
            total = count(self.config, role)
            assert len(members) <= total, f"{len(members)} of {total} {role}s"
            taken = [process.rank for process in members if process.rank is not None]
            assert sorted(taken) == (list(range(total)) if self.started else []), f"{role} ranks {taken}"
        for node, process in self.processes.items():
            assert node == process.node
            assert process.wanted is None or process.rank in (None, process.wanted), f"{process.describe()} was renamed"
            assert (process.state is State.JOINING) == (not self.started), process
            assert (process.gone is None) == process.live, process
            assert process.gone is None or process.gone.lost == (process.state is State.LOST), process


def _number(process: Process) -> int | None:
    return process.wanted if process.rank is None else process.rank


def _failed(to: str, error: KVStoreError, sequence: int | None = None) -> Send:
    return Send(to, Failed(sequence=sequence, failure=Failure(*to_wire(error))))
