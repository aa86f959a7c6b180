"""What the scheduler knows of one process, and the states such a process passes through.

    absent --Register--> joining --job complete--> active --Leave--------------> left
       ^                    |                         |
       |                    |                         +----silence, Exited-----> lost
       +-----Leave, Exited, connection gone

A joining process that goes leaves nothing behind: its place is free again. Nobody comes back from left or lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvstore.messages import Agree, Barrier, Beat, Exited, Gone, Leave, Probe, Register, Role, Start


class State(StrEnum):
    """Where a process stands. The values appear in `ProcessStatus`; an absent process is not stored at all."""

    ABSENT = "absent"
    JOINING = "joining"
    ACTIVE = "active"
    LEFT = "left"
    LOST = "lost"


TRANSITIONS: Mapping[tuple[State, type], State] = {
    (State.ABSENT, Register): State.JOINING,
    (State.JOINING, Register): State.JOINING,  # sent again; also the sign of life of a process without job id
    (State.JOINING, Beat): State.JOINING,
    (State.JOINING, Start): State.ACTIVE,
    (State.JOINING, Leave): State.ABSENT,
    (State.JOINING, Exited): State.ABSENT,
    (State.JOINING, Probe): State.ABSENT,  # a message to it could not be sent
    (State.ACTIVE, Register): State.ACTIVE,  # its Start was lost on the way
    (State.ACTIVE, Beat): State.ACTIVE,
    (State.ACTIVE, Barrier): State.ACTIVE,
    (State.ACTIVE, Agree): State.ACTIVE,
    (State.ACTIVE, Leave): State.LEFT,
    (State.ACTIVE, Exited): State.LOST,
    (State.ACTIVE, Probe): State.LOST,  # silent for too long, and no message could be sent to it
    (State.LEFT, Leave): State.LEFT,
    (State.LEFT, Beat): State.LEFT,  # was under way when the process left
}
"""State after a message; `Start`: after we sent one; `Probe`: after one failed. A missing entry is a ProtocolError."""


@dataclass
class Process:
    """One registered process. `wanted`: the rank it asks for. Times are the scheduler's own seconds."""

    node: str
    role: Role
    wanted: int | None
    endpoint: str
    host: str
    pid: int
    last_heard: float
    state: State = State.JOINING
    rank: int | None = None
    reachable: bool = True
    probed: float = -math.inf
    gone: Gone | None = None

    @property
    def live(self) -> bool:
        """Can still be waited for."""
        return self.state in (State.JOINING, State.ACTIVE)

    def hear(self, now: float) -> None:
        """Note a sign of life."""
        self.last_heard = now
        self.reachable = True

    def describe(self) -> str:
        """Return 'worker 1 (host a, pid 7)'; with where it listens, and how it ended, if so."""
        rank = self.rank if self.rank is not None else self.wanted
        number = "" if rank is None else f" {rank}"
        end = "" if self.live else f"; {self.state}"
        return f"{self.role}{number} ({place(self.host, self.pid, self.endpoint)}{end})"


def place(host: str, pid: int, endpoint: str = "") -> str:
    """Return 'host a, pid 7', with 'at tcp://...' for a process that listens."""
    return f"host {host or '?'}, pid {pid}" + (f", at {endpoint}" if endpoint else "")


def listed(ranks: list[int], most: int = 10) -> str:
    """Return '0, 2, 3' for people, cut after `most` numbers."""
    shown = ", ".join(str(rank) for rank in ranks[:most])
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"
