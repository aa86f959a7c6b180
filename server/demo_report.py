"""What the demo shows at its end: figures from the workers' epochs, the table, what compression cost in accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from kvstore.server.demo_worker import Epoch
from kvstore.server.report import ratio, size

POINTS = 2.0
"""Percentage points by which the mean test accuracies, raw and compressed, may differ less than."""


@dataclass(frozen=True)
class Curve:
    """One setting's trainings.

    accuracies: percent, shape (seeds, epochs). pushed, pulled: bytes of all workers since the start, means over the
    seeds, shape (epochs,). seconds: mean over the seeds of the slowest worker's whole training.
    """

    label: str
    accuracies: NDArray[np.float64]
    pushed: NDArray[np.float64]
    pulled: NDArray[np.float64]
    seconds: float

    @property
    def accuracy(self) -> float:
        """Percent after the last epoch, mean over the seeds."""
        return float(self.accuracies[:, -1].mean())


def curve(epochs: Iterable[Epoch], setting: str, label: str, workers: int) -> Curve:
    """Gather one setting's epochs, of every worker and seed, in any order.

    Raises:
        ValueError: some epoch of some worker is missing.
    """
    mine = sorted((e for e in epochs if e.setting == setting), key=lambda e: (e.seed, e.epoch, e.rank))
    seeds, last = len({e.seed for e in mine}), max((e.epoch for e in mine), default=0)
    if not mine or len(mine) != seeds * last * workers:
        raise ValueError(f"{setting}: {len(mine)} epochs told, expected {seeds} seeds x {last} epochs x {workers}")

    def gathered(values: Sequence[float]) -> NDArray[np.float64]:
        return np.array(values, dtype=np.float64).reshape(seeds, last, workers)

    return Curve(
        label=label,
        accuracies=100 * gathered([e.accuracy or 0.0 for e in mine])[:, :, 0],
        pushed=gathered([e.pushed for e in mine]).sum(axis=2).mean(axis=0),
        pulled=gathered([e.pulled for e in mine]).sum(axis=2).mean(axis=0),
        seconds=float(gathered([e.seconds for e in mine])[:, -1].max(axis=1).mean()),
    )


def table(curves: Sequence[Curve], title: str) -> Table:
    """One row per curve; the ratio is to the first one's pushed bytes."""
    seeds = len(curves[0].accuracies)
    means = f"means over {seeds} seeds; " if seeds > 1 else ""
    made = Table(title=title, caption=f"{means}bytes of all workers; seconds of training, over loopback")
    made.add_column("gradients")
    for column in ("test accuracy", "pushed", "pulled", "ratio", "seconds"):
        made.add_column(column, justify="right")
    raw = curves[0].pushed[-1]
    for one in curves:
        spread = f" ± {one.accuracies[:, -1].std(ddof=1):.2f}" if seeds > 1 else ""
        made.add_row(
            one.label, f"{one.accuracy:.2f}{spread} %", size(round(one.pushed[-1])), size(round(one.pulled[-1])),
            ratio(raw, one.pushed[-1]), f"{one.seconds:.1f}",
        )  # fmt: skip
    return made


def verdict(raw: Curve, compressed: Curve) -> tuple[bool, str]:
    """Return whether the accuracies differ by less than `POINTS`, and the line that says so."""
    difference = compressed.accuracy - raw.accuracy
    well = abs(difference) < POINTS
    allowed = f"less than {POINTS:g} is expected"
    if well:
        less = f"{raw.pushed[-1] / compressed.pushed[-1]:.1f} times fewer bytes pushed"
        return True, f"{less}; the accuracies differ by {difference:+.2f} points ({allowed})."
    return False, (
        f"the accuracies differ by {difference:+.2f} points, {allowed}: "
        f"{raw.label} {raw.accuracy:.2f} %, {compressed.label} {compressed.accuracy:.2f} %; "
        "try more --epochs, another --threshold, or --seeds 5"
    )


def results(curves: Mapping[str, Curve]) -> dict[str, Any]:
    """The same figures as plain data: percent, bytes, seconds."""
    return {
        name: {
            "label": one.label, "accuracies": one.accuracies.tolist(), "pushed_bytes": one.pushed.tolist(),
            "pulled_bytes": one.pulled.tolist(), "seconds": one.seconds,
        }
        for name, one in curves.items()
    }  # fmt: skip
