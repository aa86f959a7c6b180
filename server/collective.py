"""Calls that every worker makes: barriers, and values that all must agree on.

The `turn`-th call of each worker belongs together. It is settled once, with one outcome for all: complete, a mismatch,
a worker that is gone, or the earliest deadline of those that wait. Who asks again, or comes late, gets that outcome.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

from kvstore.errors import (
    KVStoreError,
    MismatchError,
    OperationTimeoutError,
    PeerLeftError,
    PeerLostError,
    ProtocolError,
    to_wire,
)
from kvstore.messages import Ack, Agree, Barrier, Failed, Failure, Gone
from kvstore.server.processes import listed

Answer: TypeAlias = tuple[int, Ack | Failed]
"""A worker's rank and what to tell it."""

_VALUE_SHOWN = 300
_GROUPS_SHOWN = 8


@dataclass
class _Gathering:
    name: str
    calls: dict[int, Barrier | Agree] = field(default_factory=dict)
    deadline: float = math.inf
    expires: float = -math.inf
    timeout: float = 0.0
    settled: bool = False
    error: KVStoreError | None = None

    def answer(self, rank: int) -> Answer:
        sequence = self.calls[rank].sequence
        if self.error is None:
            return rank, Ack(sequences=[sequence])
        return rank, Failed(sequence=sequence, failure=Failure(*to_wire(self.error)))


class Collective:
    """All unsettled and recently settled calls of a job with `workers` workers."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._gatherings: dict[tuple[str | None, int], _Gathering] = {}
        self._gone: dict[int, Gone] = {}

    def call(self, request: Barrier | Agree, now: float) -> list[Answer]:
        """Take a worker's call. Raises ProtocolError if it calls one turn twice."""
        topic = request.topic if isinstance(request, Agree) else None
        name = f"barrier {request.turn}" if topic is None else f"agreement on {topic} (call {request.turn})"
        gathering = self._gatherings.setdefault((topic, request.turn), _Gathering(name))
        new = request.rank not in gathering.calls
        earlier = gathering.calls.setdefault(request.rank, request)
        if earlier.sequence != request.sequence:
            raise ProtocolError(f"worker {request.rank} called {name} twice, as {earlier.sequence}, {request.sequence}")
        if new:
            gathering.expires = max(gathering.expires, now + request.timeout)
            if now + request.timeout < gathering.deadline:
                gathering.deadline, gathering.timeout = now + request.timeout, request.timeout
        if gathering.settled:
            return [gathering.answer(request.rank)]
        return self._settle_if_decided(gathering) if new else []

    def depart(self, gone: Gone) -> list[Answer]:
        """A worker is out: whoever waits for it, now or later, is told."""
        self._gone[gone.rank] = gone
        return [answer for gathering in self._open() for answer in self._settle_if_decided(gathering)]

    def tick(self, now: float) -> list[Answer]:
        """Settle what is overdue, and forget what nobody can ask about again."""
        answers: list[Answer] = []
        for gathering in self._open():
            if now >= gathering.deadline:
                missing = [rank for rank in range(self._workers) if rank not in gathering.calls]
                text = (
                    f"{gathering.name} was not complete after {gathering.timeout:g} s: "
                    f"not called yet by worker {listed(missing)} (of {self._workers})"
                )
                answers += self._settle(gathering, OperationTimeoutError(text, rank=missing[0]))
        self._forget(now)
        return answers

    def validate(self) -> None:
        """Check the invariants; raises AssertionError. For tests."""
        for gathering in self._gatherings.values():
            assert gathering.calls, f"{gathering.name} was opened by nobody"
            assert all(0 <= rank < self._workers for rank in gathering.calls), gathering
            if not gathering.settled:
                assert self._obstacle(gathering) is None, f"{gathering.name} waits for a process that is gone"
                assert len(gathering.calls) < self._workers, f"{gathering.name} is complete but not answered"

    def _open(self) -> list[_Gathering]:
        return [gathering for gathering in self._gatherings.values() if not gathering.settled]

    def _settle_if_decided(self, gathering: _Gathering) -> list[Answer]:
        error = self._obstacle(gathering)
        if error is None and len(gathering.calls) < self._workers:
            return []
        return self._settle(gathering, error or _difference(gathering))

    @staticmethod
    def _settle(gathering: _Gathering, error: KVStoreError | None) -> list[Answer]:
        gathering.settled, gathering.error = True, error
        return [gathering.answer(rank) for rank in sorted(gathering.calls)]

    def _obstacle(self, gathering: _Gathering) -> KVStoreError | None:
        for rank, gone in sorted(self._gone.items()):
            if gone.lost:
                return lost_error(gone, f"{gathering.name} cannot complete: ")
            if rank not in gathering.calls:
                text = f"{gathering.name} cannot complete: worker {rank} closed its store without calling it"
                return PeerLeftError(text, role=str(gone.role), rank=rank)
        return None

    def _forget(self, now: float) -> None:
        # A worker stops asking after its own timeout, but one that has not called yet still needs the outcome.
        live = set(range(self._workers)) - set(self._gone)
        for key, gathering in list(self._gatherings.items()):
            if gathering.settled and now > gathering.expires and live <= set(gathering.calls):
                del self._gatherings[key]


def lost_error(gone: Gone, prefix: str = "") -> PeerLostError:
    """The error that tells about a lost process, with its role, rank and age."""
    reason = "died" if gone.exit_code is None else f"ended with exit code {gone.exit_code}"
    reason += f", last heard of {gone.age:.1f} s before that was noticed"
    return PeerLostError(f"{prefix}{gone.role} {gone.rank} {reason}", role=str(gone.role), rank=gone.rank, age=gone.age)


def _difference(gathering: _Gathering) -> MismatchError | None:
    groups: dict[str, list[int]] = {}
    for rank, call in sorted(gathering.calls.items()):
        groups.setdefault(call.value if isinstance(call, Agree) else "", []).append(rank)
    if len(groups) <= 1:
        return None
    lines = [
        f"  rank{'s' if len(members) > 1 else ''} {listed(members)}: "
        + (value if len(value) <= _VALUE_SHOWN else f"{value[:_VALUE_SHOWN]}... ({len(value)} characters)")
        for value, members in list(groups.items())[:_GROUPS_SHOWN]
    ]
    more = f"\n  and {len(groups) - _GROUPS_SHOWN} other values" if len(groups) > _GROUPS_SHOWN else ""
    return MismatchError(f"{gathering.name} failed: every rank must give the same value\n" + "\n".join(lines) + more)
