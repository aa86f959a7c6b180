"""The demo's figure, from made-up curves."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import KVStoreError
from kvstore.server.demo_plot import draw, plot
from kvstore.server.demo_report import Curve


def _curve(label: str, accuracy: float, pushed: float, seeds: int = 2) -> Curve:
    return Curve(
        label=label, accuracies=np.full((seeds, 2), accuracy) + np.arange(seeds)[:, None],
        pushed=np.array([pushed / 2, pushed]), pulled=np.array([5e5, 1e6]), seconds=1.25,
    )  # fmt: skip


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
