"""The worker of the round and memory benchmarks: the program that `kvstore-server launch` starts for every rank.

    kvstore-server launch -n 2 -s 2 -- python scripts/round_worker.py --load resnet50 --compression 2bit --out FOLDER

Writes FOLDER/<rank>.json: {"rounds_ms": [...], "memory": {round: [bytes per server]}}. A round pushes and pulls every
key, timed from a barrier until all outputs hold the new values.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import kvstore
from scripts.peers.loads import LOADS
from scripts.server_memory import server_memory

THRESHOLD = "0.5"

Array = NDArray[np.float32]


def run(arguments: argparse.Namespace) -> None:
    """All rounds of one rank; the timed ones are written to `out`/<rank>.json in ms."""
    counts = LOADS[arguments.load]
    keys = list(range(len(counts)))
    with kvstore.create("dist_sync") as store:
        if arguments.momentum > 0:
            store.set_optimizer("sgd", learning_rate=0.01, momentum=arguments.momentum)
        if arguments.compression == "2bit":
            store.set_gradient_compression({"type": "2bit", "threshold": THRESHOLD})
        memory = _sample(store, 0, arguments.memory_at)  # code is loaded, no key exists
        source = np.random.default_rng(store.rank).standard_normal(max(counts), dtype=np.float32)
        gradients = [source[:count] for count in counts]
        outs = [np.zeros(count, np.float32) for count in counts]
        store.init(keys, [np.zeros(count, np.float32) for count in counts])
        times = []
        for number in range(1, arguments.warm + arguments.rounds + 1):
            times.append(_round(store, keys, gradients, outs, arguments.api))
            memory |= _sample(store, number, arguments.memory_at)
        result = {"rounds_ms": times[arguments.warm :], "memory": memory}
        (Path(arguments.out) / f"{store.rank}.json").write_text(json.dumps(result))
        store.barrier()


def _round(store: Any, keys: list[int], gradients: list[Array], outs: list[Array], api: str) -> float:
    """One round in milliseconds; fresh copies of the gradients, as the peer's loop needs them."""
    fresh = [gradient.copy() for gradient in gradients]
    store.barrier()
    start = time.perf_counter()
    if api == "pushpull":
        store.pushpull(keys, fresh, out=outs)
    else:
        store.push(keys, fresh)
        store.pull(keys, out=outs)
    return (time.perf_counter() - start) * 1e3


def _sample(store: Any, number: int, wanted: list[int]) -> dict[int, list[int]]:
    """Rank 0 reads the servers' memory while the barrier holds the others still: {round: bytes per server}."""
    if number not in wanted:
        return {}
    store.barrier()
    sample = {number: server_memory()} if store.rank == 0 else {}
    store.barrier()
    return sample


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--load", choices=sorted(LOADS), default="resnet50")
    parser.add_argument("--compression", choices=["none", "2bit"], default="none")
    parser.add_argument("--api", choices=["pp", "pushpull"], default="pp", help="pp: push, then pull")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm", type=int, default=3, help="untimed rounds before them")
    parser.add_argument("--momentum", type=float, default=0.0, help="above 0: sgd with it runs on the servers")
    parser.add_argument("--memory-at", type=int, nargs="*", default=[], help="rounds after which rank 0 reads memory")
    parser.add_argument("--out", required=True, help="folder for <rank>.json")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
