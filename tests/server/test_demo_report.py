"""The demo's figures, table, verdict, drawing and progress, from made-up epochs."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from kvstore.errors import KVStoreError
from kvstore.server.demo_plot import draw, plot
from kvstore.server.demo_progress import Watch
from kvstore.server.demo_report import Curve, curve, results, table, verdict
from kvstore.server.demo_worker import Epoch


def _epoch(setting: str, seed: int, epoch: int, rank: int, accuracy: float = 0.5) -> Epoch:
    shown = accuracy if rank == 0 else None
    return Epoch(
        setting=setting, seed=seed, epoch=epoch, rank=rank, accuracy=shown, loss=0.25, pushed=1000 * epoch,
        pulled=3000 * epoch, seconds=epoch + rank + seed,
    )  # fmt: skip


def _curve(label: str, accuracy: float, pushed: float, seeds: int = 2) -> Curve:
    return Curve(
        label=label, accuracies=np.full((seeds, 2), accuracy) + np.arange(seeds)[:, None],
        pushed=np.array([pushed / 2, pushed]), pulled=np.array([5e5, 1e6]), seconds=1.25,
    )  # fmt: skip


def _text(shown: Table) -> str:
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


def test_curves_sum_workers_and_average_seeds() -> None:
    epochs = [
        _epoch(setting, seed, epoch, rank, accuracy=0.1 * epoch + 0.01 * seed)
        for rank in (1, 0) for epoch in (2, 1) for seed in (8, 7) for setting in ("a", "b")
    ]  # fmt: skip
    found = curve(epochs, "a", "label", workers=2)
    np.testing.assert_allclose(found.accuracies, [[17, 27], [18, 28]])
    np.testing.assert_allclose(found.pushed, [2000, 4000])
    np.testing.assert_allclose(found.pulled, [6000, 12000])
    assert found.accuracy == pytest.approx(27.5)
    assert found.seconds == pytest.approx((2 + 1 + 7 + 2 + 1 + 8) / 2)
    with pytest.raises(ValueError, match="a: 7 epochs told, expected 2 seeds x 2 epochs x 2"):
        curve(epochs[2:], "a", "label", workers=2)


def test_table_shows_every_figure() -> None:
    text = _text(table([_curve("raw", 97, 1.6e7), _curve("2-bit", 96, 1e6)], "Title"))
    for heading in ("gradients", "test accuracy", "pushed", "pulled", "ratio", "seconds", "Title", "2 seeds"):
        assert heading in text
    raw, compressed = (line for line in text.splitlines() if "MB" in line)
    assert all(figure in raw for figure in ("97.50 ± 0.71 %", "16.00 MB", "1.00 MB", "1.0 x", "1.2"))
    assert all(figure in compressed for figure in ("96.50 ± 0.71 %", "1.00 MB", "16.0 x"))


@pytest.mark.parametrize(("accuracy", "well"), [(97.0, True), (95.01, True), (98.99, True), (95.0, False), (99, False)])
def test_verdict(accuracy: float, well: bool) -> None:
    found, text = verdict(_curve("raw", 97, 1.6e7), _curve("2-bit, threshold 9", accuracy, 1e6))
    assert found is well
    assert f"{accuracy - 97:+.2f} points" in text
    assert ("16.0 times fewer bytes" in text) is well
    assert ("2-bit, threshold 9" in text and "--threshold" in text) is not well


def test_results_are_plain_data() -> None:
    data = msgspec.json.decode(msgspec.json.encode(results({"raw": _curve("raw", 97, 1.6e7)})))
    assert data["raw"]["accuracies"] == [[97, 97], [98, 98]] and data["raw"]["pushed_bytes"] == [8e6, 1.6e7]


@pytest.mark.parametrize("seeds", [1, 3])
def test_figure_names_its_axes_and_curves(tmp_path: Path, seeds: int) -> None:
    pytest.importorskip("matplotlib")
    curves = [_curve("raw", 97, 1.6e7, seeds), _curve("2-bit", 96, 1e6, seeds)]
    figure = draw(curves, "Digits")
    by_epoch, by_bytes = figure.axes
    assert "Digits" in figure.get_suptitle() and ("3 seeds" in figure.get_suptitle()) is (seeds == 3)
    assert (by_epoch.get_xlabel(), by_epoch.get_ylabel()) == ("epoch", "test accuracy (%)")
    assert "MB" in by_bytes.get_xlabel() and "16.0 times" in by_bytes.get_title()
    for axes in (by_epoch, by_bytes):
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["raw", "2-bit"]
    np.testing.assert_allclose(by_bytes.lines[0].get_xdata(), [8, 16])
    plot(curves, "Digits", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(KVStoreError, match=r"matplotlib is not installed.*pip install 'gradkv\[demo\]'"):
        draw([], "")


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
