"""The table of `kvstore-server bench-codec`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvstore.server.bench_codec import Figure, best_first, verdict

_WIDTH = 140
"""Columns when nobody's terminal limits them."""


def print_bench(figures: Sequence[Figure], bandwidth: float, asked: str) -> None:
    """One row a codec, best first, and whether compression pays."""
    options: dict[str, Any] = {} if sys.stdout.isatty() else {"width": _WIDTH}
    console = Console(markup=False, highlight=False, **options)
    raw = next(figure for figure in figures if figure.name == "none").raw_bytes
    table = Table("codec", title=f"Codecs over {raw / 4e6:.1f} million elements at {asked}")
    for column in ("bits/dim", "NMSE", "encode", "decode", "round"):
        table.add_column(column, justify="right")
    for figure in best_first(figures, bandwidth):
        if figure.error:
            table.add_row(figure.name, "failed:", figure.error)
            continue
        speeds = (_speed(figure.raw_bytes, seconds) for seconds in (figure.encode_seconds, figure.decode_seconds))
        seconds = figure.round_seconds(bandwidth)
        table.add_row(figure.name, f"{figure.bits:.3f}", f"{figure.nmse:.3g}", *speeds, f"{seconds * 1e3:.1f} ms")
    console.print(table)
    console.print(verdict(figures, bandwidth))


def bench_json(figures: Sequence[Figure], bandwidth: float) -> str:
    """The same as one JSON object."""
    rows = [
        {**msgspec.to_builtins(figure), "round_seconds": figure.round_seconds(bandwidth)}
        for figure in best_first(figures, bandwidth)
    ]
    return msgspec.json.encode(
        {"bandwidth": bandwidth, "codecs": rows, "verdict": verdict(figures, bandwidth)}
    ).decode()


def _speed(raw_bytes: int, seconds: float) -> str:
    return f"{raw_bytes / seconds / 1e9:.2f} GB/s" if seconds else "-"
