#!/usr/bin/env python3
"""Growth of the servers' memory over 200 rounds of the ResNet-50 list with sgd and momentum, raw and 2bit. Linux only.

    .venv/bin/python scripts/bench_memory.py

The baseline is each server's resident memory after start-up, before the first init. Growth may be at most
1.3 x (values, masters included, + optimizer state) + the encoded pushes of one round + 50 MB per server, and after
round 200 it may differ by at most 5 % from what it was after round 50. Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.own_rounds import own_rounds
from scripts.peers.loads import LOADS

MB = 1e6
FIRST, MIDDLE, LAST = 1, 50, 200


def growth_bar(load: str, compression: str, workers: int, servers: int) -> float:
    """Bytes that all servers together may grow by."""
    values = 4 * sum(LOADS[load])  # float32: the value is its own master
    momentum = values
    push = values if compression == "none" else values // 16  # 2 of 32 bits
    return 1.3 * (values + momentum) + workers * push + servers * 50 * MB


def growths(compression: str, arguments: argparse.Namespace) -> dict[int, int]:
    """Bytes above the baseline, all servers together, after each of the rounds looked at."""
    options = ["--load", arguments.load, "--compression", compression, "--momentum", "0.9", "--warm", "0"]
    options += ["--rounds", str(LAST), "--memory-at", *map(str, (0, FIRST, MIDDLE, LAST))]
    memory = own_rounds(arguments.workers, arguments.servers, options, timeout=1800.0).memory
    return {number: sum(memory[number]) - sum(memory[0]) for number in (FIRST, MIDDLE, LAST)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--load", choices=sorted(LOADS), default="resnet50")
    arguments = parser.parse_args()
    title = f"growth of {arguments.servers} servers in MB, {arguments.workers} workers, {arguments.load}"
    table = Table(
        "pushes", *(f"round {number}" for number in (FIRST, MIDDLE, LAST)), "at most", "drift", "", title=title
    )
    met = True
    for compression in ("none", "2bit"):
        growth = growths(compression, arguments)
        bar = growth_bar(arguments.load, compression, arguments.workers, arguments.servers)
        drift = abs(growth[LAST] - growth[MIDDLE]) / max(1, growth[MIDDLE])
        holds = max(growth.values()) <= bar and drift <= 0.05
        met = met and holds
        sizes = [f"{size / MB:.1f}" for size in growth.values()]
        name = compression.replace("none", "raw")
        table.add_row(name, *sizes, f"{bar / MB:.1f}", f"{drift:.1%}", "ok" if holds else "MISSED")
    Console().print(table)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
