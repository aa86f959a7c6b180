"""The demo over a real job: exit code, table, files; what stops it before and during the training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.errors import ConfigError, ParameterError
from kvstore.server import demo
from kvstore.server.demo_data import Images
from kvstore.server.demo_worker import Epoch
from kvstore.server.launch_plan import Plan

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

ROUNDS = 1437 // 64
PARAMETERS = {"hidden.weight": 64 * 128, "hidden.bias": 128, "output.weight": 128 * 10, "output.bias": 10}


@dataclass
class Run:
    """What one `kvstore-server demo` left behind."""

    code: int
    out: str
    err: str
    results: dict[str, Any]
    folder: Path

    def accuracy(self, setting: str) -> float:
        return float(np.mean([training[-1] for training in self.results[setting]["accuracies"]]))


def _run(folder: Path, *options: str, timeout: float) -> Run:
    command = [sys.executable, "-m", "kvstore.server", "demo", "--output", str(folder), *options]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, "COLUMNS": "100"}
    )
    results = folder / "results.json"
    found = json.loads(results.read_text()) if results.exists() else {}
    return Run(ended.returncode, ended.stdout, ended.stderr, found, folder)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two epochs, two workers, two servers."""
    return _run(tmp_path_factory.mktemp("demo") / "new" / "folder", "--epochs", "2", timeout=100)


@pytest.mark.parametrize(("compressed", "code"), [(0.94, 0), (0.965, 0), (0.925, 1)])
def test_ends_well_if_the_accuracies_are_close(
    compressed: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A job that tells 95 % for raw gradients: two points less are too much."""

    def tell(plan: Plan, out: int, err: int) -> int:
        for setting, accuracy in (("raw", 0.95), ("2bit", compressed)):
            told = Epoch(
                setting=setting, seed=0, epoch=1, rank=0, accuracy=accuracy, loss=0.1, pushed=64, pulled=64, seconds=1.0
            )  # fmt: skip
            os.write(out, b"worker 0 | %s\n" % msgspec.json.encode(told))
        return 0

    monkeypatch.setattr(demo, "launch", tell)
    assert demo.run_demo(output=tmp_path, workers=1, servers=1, epochs=1) == code
    out, err = capfd.readouterr()
    assert f"the accuracies differ by {100 * compressed - 95:+.2f} points" in (err if code else out)


def test_trains(short: Run) -> None:
    """Even two epochs come far above the 10 % of guessing."""
    assert short.accuracy("raw") > 80 and short.accuracy("2bit") > 70
    assert len(short.results["raw"]["accuracies"][0]) == 2


def test_counts_every_byte_of_both_workers(short: Run) -> None:
    raw = 4 * sum(PARAMETERS.values())
    compressed = sum(4 * -(-elements // 16) for elements in PARAMETERS.values())
    for setting, pushed in (("raw", raw), ("2bit", compressed)):
        figures = short.results[setting]
        assert figures["pushed_bytes"] == [2 * ROUNDS * pushed, 4 * ROUNDS * pushed]
        assert figures["pulled_bytes"] == [2 * ROUNDS * raw, 4 * ROUNDS * raw]


def test_shows_progress_table_and_figure(short: Run) -> None:
    for heading in ("test accuracy", "pushed", "pulled", "ratio", "seconds"):
        assert heading in short.out
    raw, compressed = (line for line in short.out.splitlines() if "│" in line)
    assert "raw, float32" in raw and "3.38 MB" in raw and f"{short.accuracy('raw'):.2f} %" in raw
    assert "2-bit, threshold 2" in compressed and "211.55 kB" in compressed and "16.0 x" in compressed
    figure = short.folder / "accuracy.png"
    assert f"Figure: {figure}" in short.out
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "raw, float32, seed 0: epoch 2/2, accuracy" in short.err
    assert "Traceback" not in short.err


def test_other_sizes_of_the_job(tmp_path: Path) -> None:
    """A lost residual or a wrong shard shows in the bytes; a too large threshold is a failure with a clear line."""
    ended = _run(tmp_path, "--epochs", "1", "-n", "1", "-s", "1", "--threshold", "1e6", "--seeds", "2", timeout=100)
    assert ended.code == 1
    assert len(ended.results["raw"]["accuracies"]) == 2
    assert "kvstore-server: the accuracies differ by -" in ended.err and "--threshold" in ended.err
    assert "1 worker, 1 server, 2 seeds, 1 epoch" in ended.out


def test_failing_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Labels that no model has: a worker raises, its last words and the exit code are shown."""

    def no_digits(name: str, seed: int) -> Images:
        images, labels = np.zeros((128, 4), np.uint8), np.full(128, 77, np.uint8)
        return Images(images, labels, images, labels, brightest=1)

    monkeypatch.setattr(demo, "load_images", no_digits)
    assert demo.run_demo(output=tmp_path, workers=1, servers=1) == 1
    err = capfd.readouterr().err
    assert "worker 0 | IndexError" in err and "the demo's job failed with exit code 1" in err
    assert not (tmp_path / "results.json").exists()


def test_ctrl_c_is_no_failure_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "launch", lambda plan, out, err: 130)
    assert demo.run_demo(output=tmp_path) == 130
    assert "failed" not in capfd.readouterr().err


def test_wrong_options_are_told_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "launch", None)
    with pytest.raises(ParameterError, match="threshold"):
        demo.run_demo(threshold=-1.0, output=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--output"):
        demo.run_demo(output=tmp_path / "file")


@pytest.mark.slow
def test_compression_costs_less_than_two_points(tmp_path: Path) -> None:
    small = os.environ.get("GRADKV_TEST_SIZE", "full") == "small"
    options = ("--seeds", "2", "--epochs", "12") if small else ("--seeds", "5")
    ended = _run(tmp_path, *options, timeout=600)
    assert ended.code == 0, ended.err
    assert ended.accuracy("raw") > 95
    assert abs(ended.accuracy("raw") - ended.accuracy("2bit")) < 2
