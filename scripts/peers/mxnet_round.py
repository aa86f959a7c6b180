"""Round times of MXNet's dist_sync store on loopback tcp. Runs under an interpreter that has MXNet 1.9.1.

    .venv-mxnet/bin/python scripts/peers/mxnet_round.py --workers 2 --servers 2 --load resnet50 --compression 2bit

Starts a scheduler, servers and workers, each with OMP_NUM_THREADS=1. A round pushes and pulls every key; it is timed
from a barrier until all outputs are readable, and the slowest worker counts. Prints one JSON line.

Importing mxnet in a process whose DMLC_ROLE is scheduler or server runs that role and never returns, so this one
file is the program of every role; only workers reach `run_worker`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.peers.loads import LOADS

THRESHOLD = 0.5


def run_worker(arguments: argparse.Namespace) -> None:
    """One worker: `warm` rounds untimed, then `rounds` timed ones, written to `out`/<rank>.json in ms."""
    import mxnet
    import numpy

    store = mxnet.kv.create("dist_sync")
    if arguments.compression == "2bit":
        store.set_gradient_compression({"type": "2bit", "threshold": THRESHOLD})
    counts = LOADS[arguments.load]
    source = numpy.random.RandomState(store.rank).standard_normal(max(counts)).astype("float32")
    gradients = [mxnet.nd.array(source[:count]) for count in counts]
    outs = [mxnet.nd.zeros((count,)) for count in counts]
    for key, count in enumerate(counts):
        store.init(key, mxnet.nd.zeros((count,)))
    mxnet.nd.waitall()
    times = [_round(mxnet, store, gradients, outs) for _ in range(arguments.warm + arguments.rounds)]
    (Path(arguments.out) / f"{store.rank}.json").write_text(json.dumps(times[arguments.warm :]))
    store._barrier()


def _round(mxnet: Any, store: Any, gradients: list[Any], outs: list[Any]) -> float:
    """One round in milliseconds. Copies, because MXNet's push keeps its argument and its next pull overwrites it."""
    fresh = [gradient.copy() for gradient in gradients]
    mxnet.nd.waitall()
    store._barrier()
    start = time.perf_counter()
    for key, (gradient, out) in enumerate(zip(fresh, outs, strict=True)):
        store.push(key, gradient, priority=-key)
        store.pull(key, out=out, priority=-key)
    mxnet.nd.waitall()
    return (time.perf_counter() - start) * 1e3


def run_cluster(arguments: argparse.Namespace, folder: Path) -> list[float]:
    """Start every role, wait for the workers, end the rest.

    Returns: milliseconds of each round, the slowest worker's.
    """
    roles = ["scheduler"] + ["server"] * arguments.servers + ["worker"] * arguments.workers
    environment = _environment(arguments.workers, arguments.servers)
    command = [sys.executable, __file__, *sys.argv[1:], "--out", str(folder)]
    log = folder / "log.txt"
    with log.open("wb") as output:
        processes = [
            subprocess.Popen(
                command, env={**environment, "DMLC_ROLE": role}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            for role in roles
        ]
        try:
            codes = _wait_for_workers(processes[-arguments.workers :], arguments.timeout)
        finally:
            _end(processes)
    if any(codes):
        raise SystemExit(f"MXNet's workers ended with {codes}:\n{log.read_text(errors='replace')[-4000:]}")
    per_worker = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(arguments.workers)]
    return [max(times) for times in zip(*per_worker, strict=True)]


def _environment(workers: int, servers: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        **os.environ,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
        "OMP_NUM_THREADS": "1",
    }


def _wait_for_workers(workers: list[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """Exit codes of the workers; one that is not done at the deadline counts as -9."""
    deadline = time.monotonic() + timeout
    codes = []
    for worker in workers:
        try:
            codes.append(worker.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(-9)
    return codes


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Servers and scheduler leave by themselves after the workers; what has not after a moment is killed."""
    for process in processes:
        try:
            process.wait(3.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--load", choices=sorted(LOADS), default="resnet50")
    parser.add_argument("--compression", choices=["none", "2bit"], default="none")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the whole run")
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if os.environ.get("DMLC_ROLE"):
        run_worker(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        rounds = run_cluster(arguments, Path(folder))
    facts = {name: getattr(arguments, name) for name in ("load", "workers", "servers", "compression")}
    facts["rounds_ms"] = [round(milliseconds, 2) for milliseconds in rounds]
    print(json.dumps({"peer": "mxnet-1.9.1", **facts, "median_ms": round(statistics.median(rounds), 2)}))


if __name__ == "__main__":
    main()
