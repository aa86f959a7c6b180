"""What users of other stores ran into, over real processes: load of the servers, and what can be seen of it."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

import kvstore


def balance() -> Any:
    """100 keys of mixed sizes and one of 20 MB; counters of this worker, and what an outsider sees of the servers."""
    import subprocess

    rng = np.random.default_rng(60)
    sizes: dict[Any, int] = {f"layer{number}.weight": int(10 ** rng.uniform(1, 5)) for number in range(50)}
    sizes |= {number: int(10 ** rng.uniform(1, 5)) for number in range(50)}
    sizes["large"] = 5_000_000
    keys = list(sizes)
    with kvstore.create("dist_sync") as kv:
        kv.init(keys, [np.zeros(size, np.float32) for size in sizes.values()])
        kv.pushpull(keys, [np.ones(size, np.float32) for size in sizes.values()])
        raw = kv.stats()
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        kv.init("counted", np.zeros(1_000_000, np.float32))
        for _ in range(2):
            kv.pushpull("counted", np.ones(1_000_000, np.float32))
        kv.barrier()
        status = None
        if kv.rank == 0:
            command = [sys.executable, "-m", "kvstore.server", "status", "--json", "--keys"]
            status = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
        kv.barrier()
        stats = kv.stats()
        return {"servers": raw["servers"], "raw": sum(sizes.values()) * 4, "counted": stats["keys"]["counted"],
                "total": stats["total"], "status": status}  # fmt: skip


def placement(status: Any) -> Any:
    return {rank: sorted((str(key["key"]), key["chunks"]) for key in one["keys"]) for rank, one in status.items()}


def test_r60_servers_share_the_load_and_everybody_sees_it(run_job: Any) -> None:
    first = run_job(balance, workers=2, servers=4).ok()
    again = run_job(balance, workers=1, servers=4).ok()
    for result in (*first, *again):
        loads = [server["raw_bytes"] for server in result["servers"].values()]
        assert len(loads) == 4 and sum(loads) == result["raw"]
        assert max(loads) <= 1.5 * sum(loads) / 4, loads
        assert result["servers"] == first[0]["servers"], "placed differently by another worker or job"
        counted = result["counted"]
        assert (counted["pushes"], counted["pulls"], counted["raw_bytes"]) == (2, 2, 8_000_000)
        assert counted["raw_bytes"] / counted["sent_bytes"] >= 14
        assert counted["encode_seconds"] > 0
        assert result["total"]["raw_bytes"] == result["raw"] + 8_000_000
    one, two = again[0]["status"]["servers"], first[0]["status"]["servers"]
    assert placement(one) == placement(two)
    for servers, workers in ((one, 1), (two, 2)):
        received = [server["totals"]["raw_bytes"] for server in servers.values()]
        assert sum(received) == workers * (first[0]["raw"] + 8_000_000)
        assert max(received) <= 1.5 * sum(received) / 4, received
        rows = [row for server in servers.values() for row in server["keys"] if row["key"] == "counted"]
        assert sum(row["raw_bytes"] for row in rows) >= 14 * sum(row["received_bytes"] for row in rows) > 0
