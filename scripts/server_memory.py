"""Memory of the servers of the job that this worker belongs to, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

import psutil


def server_memory() -> list[int]:
    """Resident bytes of every server process, in the order the launcher started them.

    The servers are the processes below our launcher whose environment says DMLC_ROLE=server.
    """
    launcher = psutil.Process().parent()
    below = launcher.children(recursive=True) if launcher else []
    servers = [process.pid for process in below if process.environ().get("DMLC_ROLE") == "server"]
    if not servers:
        raise RuntimeError("no server beside this worker: start it with kvstore-server launch")
    return [_resident_bytes(pid) for pid in sorted(servers)]


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no VmRSS line")
