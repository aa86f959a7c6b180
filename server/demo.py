"""`kvstore-server demo`: trains a classifier over a real job, raw and with 2-bit compression, and compares."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from kvstore.compression.policy import CompressionPolicy
from kvstore.errors import ConfigError
from kvstore.server.demo_data import load_images
from kvstore.server.demo_plot import import_figure, plot
from kvstore.server.demo_progress import Watch
from kvstore.server.demo_report import Curve, curve, results, table, verdict
from kvstore.server.demo_worker import INTERRUPTED, Epoch, Task
from kvstore.server.launch_plan import Plan
from kvstore.server.launcher import launch

RAW, COMPRESSED = "raw", "2bit"


@dataclass(frozen=True)
class Training:
    """How a data set is trained. threshold: what one compressed element sends; gradients are sums over samples."""

    title: str
    epochs: int
    batch: int
    hidden: int
    learning_rate: float
    momentum: float
    threshold: float


TRAININGS: Mapping[str, Training] = {
    "digits": Training("Digits", 25, 64, 128, 0.2, 0.5, 2.0),
    "fashion-mnist": Training("Fashion-MNIST", 8, 256, 256, 0.1, 0.5, 4.0),
}
"""Per data set; found by trying."""


def run_demo(
    *,
    data: str = "digits",
    epochs: int | None = None,
    workers: int = 2,
    servers: int = 2,
    threshold: float | None = None,
    output: Path = Path("demo-results"),
    seed: int = 0,
    seeds: int = 1,
) -> int:
    """Train, show a table, and write `accuracy.png` and `results.json` to `output`.

    Args:
        data: one of `TRAININGS`. epochs, threshold: None for that data set's own.
        seed, seeds: trains with `seeds` seeds from `seed` on; `seed` also splits the digits.

    Returns:
        0; the job's exit code if it failed; 1 if the mean accuracies differ by 2 points or more.

    Raises:
        KVStoreError: a package or the data set is not installed.
        ConfigError: the codec refuses the threshold, or `output` cannot be made.
    """
    training = TRAININGS[data]
    threshold = training.threshold if threshold is None else threshold
    params = {"type": "2bit", "threshold": str(threshold)}
    CompressionPolicy.parse(params)
    import_figure()  # also these: what can fail should do so before the training
    _make_folder(output)
    task = Task(
        settings={RAW: None, COMPRESSED: params}, seeds=list(range(seed, seed + seeds)),
        epochs=epochs or training.epochs, batch=training.batch, hidden=training.hidden,
        learning_rate=training.learning_rate, momentum=training.momentum,
    )  # fmt: skip
    console, errors = (Console(stderr=stderr, highlight=False, markup=False) for stderr in (False, True))
    labels = {RAW: "raw, float32", COMPRESSED: f"2-bit, threshold {threshold:g}"}
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder:
        images = load_images(data, seed)
        images.save(Path(folder, "images.npz"))
        job = f"{_counted(workers, 'worker')}, {_counted(servers, 'server')}"
        console.print(
            f"{training.title}: {len(images.train_images)} images to train with, {len(images.test_images)} to test; "
            f"{job}, {_counted(seeds, 'seed')}, {_counted(task.epochs, 'epoch')}", soft_wrap=True,
        )  # fmt: skip
        code, told = _run_job(task, Path(folder), workers, servers, labels, errors)
    if code == INTERRUPTED:
        return code
    if code:
        errors.print(f"kvstore-server: the demo's job failed with exit code {code}; its last words are above")
        return code
    curves = {name: curve(told, name, label, workers) for name, label in labels.items()}
    return _show(curves, f"{training.title}, {job}", output, console, errors)


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}") from error


def _show(curves: Mapping[str, Curve], title: str, output: Path, console: Console, errors: Console) -> int:
    console.print(table(list(curves.values()), title))
    (output / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results(curves))))
    plot(list(curves.values()), title, output / "accuracy.png")
    console.print(f"Figure: {output / 'accuracy.png'}", soft_wrap=True)
    well, text = verdict(curves[RAW], curves[COMPRESSED])
    if well:
        console.print(text, soft_wrap=True)
    else:
        errors.print(f"kvstore-server: {text}", soft_wrap=True)
    return 0 if well else 1


def _run_job(
    task: Task, folder: Path, workers: int, servers: int, labels: Mapping[str, str], errors: Console
) -> tuple[int, list[Epoch]]:
    """Launch the job; return its exit code and what its workers told."""
    (folder / "task.json").write_bytes(msgspec.json.encode(task))
    # Models this small are computed fastest by one thread; the variables are those of NumPy's linear algebra.
    one_thread = {name: os.environ.get(name, "1") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")}
    plan = Plan(
        command=(
            sys.executable, "-m", "kvstore.server.demo_worker", str(folder / "task.json"), str(folder / "images.npz"),
        ),
        workers=workers, servers=servers, worker_env=one_thread,
    )  # fmt: skip
    watch = Watch(labels, epochs=task.epochs, seeds=len(task.seeds), console=errors)
    with watch, _lines_to(watch.line) as out, _lines_to(watch.remark) as err:
        code = launch(plan, out=out, err=err)
    return code, watch.told


@contextmanager
def _lines_to(take: Callable[[str], None]) -> Iterator[int]:
    """Give the writing end of a pipe, whose lines go to `take`, in a thread of their own, until all are through."""
    reading, writing = os.pipe()

    def read() -> None:
        with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                take(line.rstrip("\n"))

    thread = threading.Thread(target=read, name="demo-output", daemon=True)
    thread.start()
    try:
        yield writing
    finally:
        os.close(writing)
        thread.join()


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
