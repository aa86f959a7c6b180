"""The demo's worker on a store of one process: what it tells, and that every training starts anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.local import LocalStore
from kvstore.server.demo_data import Images
from kvstore.server.demo_worker import Epoch, Task, main
from kvstore.store import KVStore


class _OneProcess(LocalStore):
    """Counts what it pulls, as distributed stores do."""

    def stats(self) -> dict[str, Any]:
        found = super().stats()
        found["total"]["pulled_bytes"] = found["total"]["raw_bytes"]
        return found


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[Epoch]:
    """Epochs of one worker on a 'device' store: raw, 2-bit and raw again, with two seeds."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 100).astype(np.uint8)
    images = np.zeros((100, 12), np.uint8)
    images[np.arange(100), labels] = 9  # a class is where the bright pixel is
    Images(images[:80], labels[:80], images[80:], labels[80:], brightest=9).save(tmp_path / "images.npz")
    task = Task(
        settings={"raw": None, "2bit": {"type": "2bit", "threshold": "0.5"}, "again": None}, seeds=[3, 4], epochs=4,
        batch=8, hidden=16, learning_rate=0.5, momentum=0.5,
    )  # fmt: skip
    (tmp_path / "task.json").write_bytes(msgspec.json.encode(task))

    def create(name: str) -> KVStore:
        assert name == "dist_sync"
        return _OneProcess("device")

    monkeypatch.setattr("kvstore.create", create)
    main(str(tmp_path / "task.json"), str(tmp_path / "images.npz"))
    return [msgspec.json.decode(line, type=Epoch) for line in capsys.readouterr().out.splitlines()]


def test_tells_every_epoch_in_order(told: list[Epoch]) -> None:
    expected = [(seed, setting, n) for seed in (3, 4) for setting in ("raw", "2bit", "again") for n in (1, 2, 3, 4)]
    assert [(epoch.seed, epoch.setting, epoch.epoch) for epoch in told] == expected
    assert all(epoch.rank == 0 and epoch.seconds > 0 for epoch in told)


def test_learns(told: list[Epoch]) -> None:
    for first, last in zip(told[0::4], told[3::4], strict=True):
        assert last.loss < first.loss
        assert last.accuracy is not None and last.accuracy > 0.7


def test_trainings_do_not_know_of_each_other(told: list[Epoch]) -> None:
    """Weights, momentum, residuals and compression are those of a new store."""
    for start in (0, 12):
        raw, compressed, again = (told[start + step : start + step + 4] for step in (0, 4, 8))
        assert [epoch.loss for epoch in raw] == [epoch.loss for epoch in again]
        assert [epoch.pushed for epoch in raw] == [epoch.pushed for epoch in again]
        assert [epoch.loss for epoch in raw] != [epoch.loss for epoch in compressed]
    assert told[0].loss != told[12].loss
