"""Ends what a launch leaves behind, also when the launcher itself was killed with SIGKILL.

Every process of a launch carries the job id in its environment (KVSTORE_JOB) and so do its descendants, whatever
session or process group they moved to. On Linux they are found by that mark in /proc; elsewhere by the process
groups that the launcher started.

Run as a script, this file is the guard: it reads the launcher's pipe on standard input (one process group a line)
until `done`, or until the pipe closes because the launcher died; then it ends the job. It imports the standard
library only, so that it starts within milliseconds and needs no package path.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "KVSTORE_JOB"
DONE = "done"
_PROC = Path("/proc")
_PAUSE = 0.02  # seconds between looks at processes that were told to end


def survivors(job: str, groups: Iterable[int]) -> set[int]:
    """Return the pids of living processes of the job, this one excepted; zombies do not count.

    Without /proc the living groups are returned, as negative numbers.
    """
    if not (_PROC / "self" / "environ").exists():
        return {-group for group in groups if _group_lives(group)}
    mark, wanted = f"{MARK}={job}\0".encode(), set(groups)
    pids = {int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()} - {os.getpid()}
    return {pid for pid in pids if _belongs(pid, mark, wanted)}


def end(job: str, groups: Iterable[int], patience: float, limit: float = 5.0) -> set[int]:
    """SIGTERM what lives of the job, SIGKILL it after `patience` seconds; return what outlived `limit` more seconds."""
    groups = list(groups)
    if patience > 0 and not _signal_until_gone(job, groups, signal.SIGTERM, patience):
        return set()
    return _signal_until_gone(job, groups, signal.SIGKILL, limit)


def send(target: int, number: int) -> None:
    """Send a signal to a process, or to a process group if `target` is negative; one that is gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(target, number)


def _signal_until_gone(job: str, groups: list[int], number: int, seconds: float) -> set[int]:
    deadline, told = time.monotonic() + seconds, set[int]()
    while left := survivors(job, groups):
        for pid in left if number == signal.SIGKILL else left - told:
            send(pid, number)
        told |= left
        if time.monotonic() >= deadline:
            break
        time.sleep(_PAUSE)
    return left


def _belongs(pid: int, mark: bytes, groups: set[int]) -> bool:
    try:
        # The name, field 2, stands in brackets and may hold anything; state and group are fields 3 and 5.
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        if fields[0] in "ZX":
            return False
        return int(fields[2]) in groups or mark in (_PROC / str(pid) / "environ").read_bytes() + b"\0"
    except (OSError, IndexError):  # it ended meanwhile, or belongs to another user
        return False


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main(job: str) -> int:
    """Watch the launcher through standard input; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: list[int] = []
    for line in sys.stdin:
        if line.strip() == DONE:
            return 0
        groups.append(int(line))
    end(job, groups, patience=0.0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
