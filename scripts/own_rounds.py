"""Runs `kvstore-server launch` over round_worker.py and reads back what the workers wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

WORKER = Path(__file__).resolve().parent / "round_worker.py"
COMMAND = Path(sysconfig.get_path("scripts")) / "kvstore-server"


@dataclass(frozen=True)
class OwnRun:
    """What one cluster measured."""

    rounds_ms: list[float]  # per round, the slowest worker's
    memory: dict[int, list[int]]  # round to resident bytes per server; round 0 is before the first init


def own_rounds(workers: int, servers: int, options: list[str], timeout: float = 600.0) -> OwnRun:
    """One cluster on loopback tcp, OMP_NUM_THREADS=1 as for the peers; `options` go to round_worker.py.

    Raises: SystemExit with the end of the log when the launcher fails or does not end within `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, str(WORKER), "--out", folder, *options]
        command = [str(COMMAND), "launch", "-n", str(workers), "-s", str(servers), "--", *program]
        _launch(command, Path(folder) / "log.txt", timeout)
        results = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(workers)]
    rounds = [max(times) for times in zip(*(result["rounds_ms"] for result in results), strict=True)]
    return OwnRun(rounds, {int(number): sizes for number, sizes in results[0]["memory"].items()})


def _launch(command: list[str], log: Path, timeout: float) -> None:
    environment = {**os.environ, "KVSTORE_TRANSPORT": "tcp", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code: int | str = launcher.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"no end after {timeout:.0f} s"
            launcher.terminate()  # the launcher ends what it started
            launcher.wait()
    if code != 0:
        raise SystemExit(f"kvstore-server launch: {code}\n{log.read_text(errors='replace')[-4000:]}")
