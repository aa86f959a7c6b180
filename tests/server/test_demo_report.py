"""The demo's figures, table and verdict, from made-up epochs."""

from __future__ import annotations

import io

import msgspec
import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

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
