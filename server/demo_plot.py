"""The demo's figure: test accuracy over epochs, and over what was pushed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.server.demo_data import missing_extra
from kvstore.server.demo_report import Curve

_LOOKS = (
    {"color": "#1f5fa8", "marker": "o", "linestyle": "-"},
    {"color": "#d9661f", "marker": "s", "linestyle": "--"},
)
"""Of the curves in order; told apart without colours too."""


def import_figure() -> Any:
    """Return matplotlib's class of figures, which draws without a screen.

    Raises:
        KVStoreError: matplotlib is not installed; names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "its figure") from error
    return Figure


def draw(curves: Sequence[Curve], title: str) -> Any:
    """Return a figure of every curve, the first being the raw one; a band spans the seeds, least to most."""
    figure = import_figure()(figsize=(10, 4.2), layout="constrained")
    by_epoch, by_bytes = figure.subplots(1, 2, sharey=True)
    for one, look in zip(curves, _LOOKS, strict=False):
        epochs = np.arange(1, one.accuracies.shape[1] + 1)
        for axes, x in ((by_epoch, epochs), (by_bytes, one.pushed / 1e6)):
            axes.plot(x, one.accuracies.mean(axis=0), label=one.label, markersize=3.5, **look)
            if len(one.accuracies) > 1:
                least, most = one.accuracies.min(axis=0), one.accuracies.max(axis=0)
                axes.fill_between(x, least, most, color=look["color"], alpha=0.15, linewidth=0)
    seeds = len(curves[0].accuracies)
    figure.suptitle(f"{title}{f', mean and range of {seeds} seeds' if seeds > 1 else ''}")
    by_epoch.set(title="Accuracy by epoch", xlabel="epoch", ylabel="test accuracy (%)")
    by_epoch.xaxis.get_major_locator().set_params(integer=True)
    times = curves[0].pushed[-1] / curves[-1].pushed[-1]
    by_bytes.set(title=f"Accuracy by bytes pushed: {times:.1f} times fewer with 2-bit", xscale="log")
    by_bytes.set_xlabel("pushed by all workers (MB, logarithmic)")
    by_bytes.xaxis.set_major_formatter(lambda megabytes, _: f"{megabytes:g}")
    for axes in (by_epoch, by_bytes):
        axes.grid(alpha=0.3, which="both")
        axes.legend(loc="lower right")
    return figure


def plot(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Write the figure as a PNG of 1440 x 605 pixels."""
    draw(curves, title).savefig(path, format="png", dpi=144)
