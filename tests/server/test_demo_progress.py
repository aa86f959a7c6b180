"""Bars and plain lines of the demo, from made-up epochs."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from kvstore.server.demo_progress import Watch
from kvstore.server.demo_worker import Epoch


def _epoch(setting: str, seed: int, epoch: int, rank: int) -> Epoch:
    shown = 0.5 if rank == 0 else None
    return Epoch(
        setting=setting, seed=seed, epoch=epoch, rank=rank, accuracy=shown, loss=0.25, pushed=1000 * epoch,
        pulled=3000 * epoch, seconds=epoch + rank + seed,
    )  # fmt: skip


def _line(epoch: Epoch) -> str:
    return f"worker {epoch.rank} | {msgspec.json.encode(epoch).decode()}"


def test_plain_lines_where_nobody_sees_bars() -> None:
    console = Console(file=io.StringIO(), width=100, markup=False)
    epochs = [_epoch("2bit", 4, epoch, rank) for epoch in range(1, 21) for rank in (0, 1)]
    with Watch({"2bit": "2-bit"}, epochs=20, seeds=1, console=console) as watch:
        for epoch in epochs:
            watch.line(_line(epoch))
        watch.line("worker 1 | [red]Traceback")
        watch.remark("server 0 | oh")
    assert watch.told == epochs
    file = console.file
    assert isinstance(file, io.StringIO)
    lines = file.getvalue().splitlines()
    assert lines[-2:] == ["worker 1 | [red]Traceback", "server 0 | oh"]
    assert len(lines) == 12
    assert lines[9] == "2-bit, seed 4: epoch 20/20, accuracy 50.0%, loss 0.250"


def test_bars_in_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with Watch({"raw": "raw, float32", "2bit": "2-bit"}, epochs=4, seeds=2, console=console) as watch:
        for epoch in range(1, 4):
            watch.line(_line(_epoch("raw", 0, epoch, 0)))
        watch.line("worker 0 | remark")
    file = console.file
    assert isinstance(file, io.StringIO)
    shown = file.getvalue()
    assert "remark" in shown and "3/8" in shown and "0/8" in shown
    assert "accuracy 50.0%, loss 0.250" in shown
