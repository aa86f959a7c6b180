#!/usr/bin/env python3
"""Round times of dist_sync over loopback tcp, ours beside MXNet's, taken alternately in one run.

    scripts/peers/setup_mxnet
    .venv/bin/python scripts/bench_round.py --peer-python .venv-mxnet/bin/python

Each repetition starts every cluster once, one after the other, so that a busy machine disturbs all alike; medians are
over the rounds of all repetitions. Without --peer-python only our own rows and bars. Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.own_rounds import own_rounds
from scripts.peers.loads import LOADS

MXNET_ROUND = Path(__file__).resolve().parent / "peers" / "mxnet_round.py"


@dataclass(frozen=True)
class Row:
    """One thing measured: whose store, its compression, and the cluster's size (as many servers as workers)."""

    system: str
    compression: str
    size: int

    @property
    def name(self) -> str:
        return f"{self.system} {self.compression.replace('none', 'raw')} {self.size}+{self.size}"


@dataclass(frozen=True)
class Bar:
    """The median of `ours` may be at most `limit` times that of `other`."""

    ours: Row
    other: Row
    limit: float


def bars(sizes: Sequence[int]) -> list[Bar]:
    """The bars that hold for clusters of these sizes."""
    found = [Bar(Row("ours", "2bit", size), Row("mxnet", "2bit", size), 0.25) for size in sizes]
    found += [Bar(Row("ours", "2bit", size), Row("ours", "none", size), 1.05) for size in sizes]
    found += [Bar(Row("ours", "none", size), Row("mxnet", "none", size), 1.0) for size in sizes if size == 1]
    return found


def measure(row: Row, arguments: argparse.Namespace) -> list[float]:
    """Milliseconds of every round of one cluster."""
    options = ["--load", arguments.load, "--compression", row.compression]
    options += ["--rounds", str(arguments.rounds), "--warm", str(arguments.warm)]
    if row.system == "ours":
        return own_rounds(row.size, row.size, [*options, "--api", arguments.api]).rounds_ms
    cluster = ["--workers", str(row.size), "--servers", str(row.size)]
    command = [arguments.peer_python, str(MXNET_ROUND), *cluster, *options]
    result = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    rounds: list[float] = json.loads(result.stdout.splitlines()[-1])["rounds_ms"]
    return rounds


def measure_all(rows: Sequence[Row], arguments: argparse.Namespace, console: Console) -> dict[Row, list[float]]:
    """Every row once per repetition, in turn."""
    rounds: dict[Row, list[float]] = {row: [] for row in rows}
    for repetition in range(1, arguments.repeat + 1):
        for row in rows:
            taken = measure(row, arguments)
            rounds[row] += taken
            console.print(f"{repetition}/{arguments.repeat} {row.name}: {statistics.median(taken):.1f} ms", style="dim")
    return rounds


def show_rows(rounds: dict[Row, list[float]], load: str, console: Console) -> None:
    table = Table("system", "median ms", "min ms", "max ms", "GB/s", title=f"one round of {load}, push + pull")
    dense = 2 * 4 * sum(LOADS[load])  # float32 bytes pushed and pulled by one worker, whatever the wire carried
    for row, times in rounds.items():
        median = statistics.median(times)
        figures = [f"{value:.1f}" for value in (median, min(times), max(times))]
        table.add_row(row.name, *figures, f"{dense / median / 1e6:.2f}")
    console.print(table)


def show_bars(rounds: dict[Row, list[float]], sizes: Sequence[int], console: Console) -> bool:
    """Print every bar whose two rows were measured. Returns: whether all hold."""
    table = Table("bar", "ratio of medians", "at most", "")
    met = True
    for bar in bars(sizes):
        if bar.ours not in rounds or bar.other not in rounds:
            continue
        ratio = statistics.median(rounds[bar.ours]) / statistics.median(rounds[bar.other])
        holds = ratio <= bar.limit
        met = met and holds
        table.add_row(
            f"{bar.ours.name} / {bar.other.name}", f"{ratio:.3f}", f"{bar.limit}", "ok" if holds else "MISSED"
        )
    console.print(table)
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer-python", help="an interpreter that has MXNet, see scripts/peers/setup_mxnet")
    parser.add_argument("--load", choices=sorted(LOADS), default="resnet50")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2], help="workers, and as many servers")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds per cluster")
    parser.add_argument("--warm", type=int, default=3, help="untimed rounds before them")
    parser.add_argument("--repeat", type=int, default=5, help="how often each cluster is started")
    parser.add_argument("--api", choices=["pp", "pushpull"], default="pp", help="our calls; the peer's are push, pull")
    arguments = parser.parse_args()
    systems = ["mxnet", "ours"] if arguments.peer_python else ["ours"]
    rows = [
        Row(system, compression, size)
        for size in arguments.sizes
        for system in systems
        for compression in ("none", "2bit")
    ]
    console = Console()
    rounds = measure_all(rows, arguments, console)
    show_rows(rounds, arguments.load, console)
    return 0 if show_bars(rounds, arguments.sizes, console) else 1


if __name__ == "__main__":
    sys.exit(main())
