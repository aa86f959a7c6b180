"""Shows how far the demo's job is: bars that move in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Self

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from kvstore.server.demo_worker import Epoch

_LINES = 10
"""Plain lines a setting takes, about: fewer for each training of many."""


class Watch:
    """Takes the lines of the job's processes, from any thread; `told` holds what the workers told.

    Args:
        labels: setting -> its name for people, in the order of the bars.
        epochs, seeds: of every training.
        console: a live display if it is a terminal.
    """

    def __init__(self, labels: Mapping[str, str], *, epochs: int, seeds: int, console: Console) -> None:
        self.told: list[Epoch] = []
        self._labels, self._epochs, self._console = labels, epochs, console
        self._every = math.ceil(epochs / max(1, _LINES // seeds))
        self._lock = threading.Lock()
        self._bars: dict[str, TaskID] = {}
        self._live: Progress | None = None
        if console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TextColumn("epochs"),
                TextColumn("{task.fields[figures]}"), console=console,
            )  # fmt: skip
            self._bars = {
                name: self._live.add_task(label, start=False, total=epochs * seeds, figures="")
                for name, label in labels.items()
            }

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def line(self, line: str) -> None:
        """Take a line of standard output, with the writer's name before it: an epoch, or anything else."""
        try:
            epoch = msgspec.json.decode(line.partition(" | ")[2], type=Epoch)
        except msgspec.DecodeError:
            self.remark(line)
            return
        with self._lock:
            self.told.append(epoch)
            if epoch.accuracy is not None:
                self._show(epoch, epoch.accuracy)

    def remark(self, line: str) -> None:
        """Show a line of a process or of the launcher as it is."""
        with self._lock:
            self._console.print(line, soft_wrap=True)

    def _show(self, epoch: Epoch, accuracy: float) -> None:
        figures = f"accuracy {accuracy:.1%}, loss {epoch.loss:.3f}"
        if self._live is not None:
            bar = self._bars[epoch.setting]
            self._live.start_task(bar)
            self._live.update(bar, advance=1, figures=figures)
        elif epoch.epoch % self._every == 0 or epoch.epoch == self._epochs:
            label = self._labels[epoch.setting]
            self._console.print(f"{label}, seed {epoch.seed}: epoch {epoch.epoch}/{self._epochs}, {figures}")
