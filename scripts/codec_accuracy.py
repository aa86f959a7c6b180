"""Trains one classifier with every codec, and writes the table of docs/codecs.md.

    python scripts/codec_accuracy.py --seeds 5 --write
    python scripts/codec_accuracy.py --codecs raw --codecs 'qsgd 4 bit'

8 workers are the 8 positions of the list of a `device` store: each position's gradient is encoded with a residual of
its own, decoded and summed, as servers do. Data: Fashion-MNIST where Debian's package of it is installed, else digits.
The accuracy of a seed is the mean of the last five evaluations. Ends with 1 if qsgd of 4 or 8 bits is a point or more
below raw.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

import kvstore
from kvstore.compression.registry import known_names, parse_params
from kvstore.errors import KVStoreError
from kvstore.server.demo_data import CLASSES, FASHION_MNIST, Images, load_images
from kvstore.server.demo_model import accuracy, loss_and_gradients, new_weights, shards

DOCS = Path(__file__).resolve().parents[1] / "docs" / "codecs.md"
WORKERS, HIDDEN, BATCH, STEPS, RATE = 8, 64, 256, 600, 0.1
EVALUATIONS, EVERY = 5, 20
PARITY = 0.01
RAW = "raw"

SETTINGS: Mapping[str, dict[str, object]] = {
    RAW: {},
    "2bit 0.01": {"type": "2bit", "threshold": 0.01},
    "qsgd 4 bit": {"type": "qsgd", "bits": 4},
    "qsgd 8 bit": {"type": "qsgd", "bits": 8},
    "1bit": {"type": "1bit"},
    "topk 1 %": {"type": "topk", "ratio": 0.01},
    "powersgd rank 2": {"type": "powersgd", "rank": 2},
    "fp16": {"type": "fp16"},
    "bf16": {"type": "bf16"},
    "fp8 e4m3": {"type": "fp8"},
    "int8": {"type": "int8"},
    "natural": {"type": "natural"},
    "terngrad": {"type": "terngrad"},
    "randomk 1 %": {"type": "randomk", "ratio": 0.01},
    "dgc 0.1 %": {"type": "dgc", "stage_rounds": 20},
    "eden 2 bit": {"type": "eden", "bits": 2},
    "drive": {"type": "drive"},
    "ef21 1 %": {"type": "ef21", "ratio": 0.01},
}
"""Rows of the table; `dgc` has a momentum of 0.9, so its learning rate is a tenth."""

REFUSED: Mapping[str, dict[str, object]] = {
    "qsgd": {"type": "qsgd", "levels": 1, "norm": "l2", "error_feedback": "on"},
    "eden": {"type": "eden", "error_feedback": "on"},
}
"""Settings that diverge, and are therefore refused."""


@dataclass(frozen=True)
class Row:
    """One line of the table, from all seeds."""

    name: str
    accuracies: list[float]
    bits: float
    seconds: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    def text(self, raw: float | None) -> str:
        """As Markdown; `raw`: the accuracy to compare with."""
        spread = statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0
        difference = "" if raw is None or self.name == RAW else f"{100 * (self.mean - raw):+.2f}"
        bits = f"{self.bits:.2f}" if self.bits >= 0.1 else f"{self.bits:.3f}"
        return f"| {self.name} | {bits} | {100 * self.mean:.2f} ± {100 * spread:.2f} | {difference} |"


def train(images: Images, params: dict[str, object], steps: int, seed: int) -> tuple[float, float]:
    """Accuracy (mean of the last evaluations), and bits per element that were pushed."""
    rate = RATE / 10 if params.get("type") == "dgc" else RATE
    train_images, test = (
        part.astype(np.float32) / images.brightest for part in (images.train_images, images.test_images)
    )
    weights: dict[str, Any] = new_weights(train_images.shape[1], HIDDEN, CLASSES, seed)
    keys = list(weights)
    with kvstore.create("device") as store:
        if params:
            store.set_gradient_compression(params)
        store.set_optimizer("sgd", learning_rate=rate, momentum=0.0, rescale_grad=1 / WORKERS)
        store.init(keys, [weights[key] for key in keys])
        found = []
        for step, parts in enumerate(_batches(len(train_images), seed), 1):
            own = [loss_and_gradients(weights, train_images[part], images.train_labels[part])[1] for part in parts]
            gradients = [[one[key] * np.float32(WORKERS / BATCH) for one in own] for key in keys]
            store.pushpull(keys, gradients, out=[weights[key] for key in keys])
            if step % EVERY == 0 and step > steps - EVALUATIONS * EVERY:
                found.append(accuracy(weights, test, images.test_labels))
            if step == steps:
                break
        total = store.stats()["total"]
        return statistics.fmean(found), 32 * total["sent_bytes"] / total["raw_bytes"]


def _batches(samples: int, seed: int) -> Iterator[list[Any]]:
    """Each worker's samples of one step, epoch after epoch."""
    epoch = 0
    while True:
        ranks = [shards(samples, BATCH, rank, WORKERS, seed, epoch) for rank in range(WORKERS)]
        for parts in zip(*ranks, strict=True):
            yield list(parts)
        epoch += 1


def refusal(params: dict[str, object]) -> str:
    """What the store says to a setting that it must refuse."""
    try:
        parse_params(params)
    except KVStoreError as error:
        return str(error)
    raise click.ClickException(f"{params} was not refused")


def write(rows: list[Row], raw: float | None, data: str, refused: str) -> None:
    """Put rows into the table, in the order of SETTINGS; those of other codecs stay."""
    text = DOCS.read_text()
    begin, end = "<!-- rows -->\n", "<!-- end of rows -->"
    head, _, rest = text.partition(begin)
    old, _, tail = rest.partition(end)
    kept = {line.split("|")[1].strip(): line for line in old.splitlines() if line.startswith("| ")}
    header = [line for line in old.splitlines() if line.startswith(("| codec", "|---"))]
    kept |= {row.name: row.text(raw) for row in rows}
    lines = [*header, *(kept[name] for name in SETTINGS if name in kept)]
    refused_begin, refused_end = "<!-- refusal -->\n", "<!-- end of refusal -->"
    before, _, after = tail.partition(refused_begin)
    _, _, last = after.partition(refused_end)
    table = "\n".join(lines)
    DOCS.write_text(f"{head}{begin}{table}\n{end}{before}{refused_begin}    {refused}\n{refused_end}{last}")
    print(f"wrote {DOCS} ({data})")


@click.command()
@click.option(
    "--codecs", multiple=True, type=click.Choice(list(SETTINGS)), help="Rows to train; default: all there are."
)
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--steps", type=click.IntRange(EVALUATIONS * EVERY), default=STEPS, show_default=True)
@click.option("--data", type=click.Choice(["digits", "fashion-mnist"]), help="Default: Fashion-MNIST where installed.")
@click.option("--write", "writes", is_flag=True, help="Put the rows into docs/codecs.md.")
def main(codecs: tuple[str, ...], seeds: int, steps: int, data: str | None, writes: bool) -> None:
    """See the module's text."""
    data = data or ("fashion-mnist" if FASHION_MNIST.is_dir() else "digits")
    there = {name for name, params in SETTINGS.items() if params.get("type", "none") in known_names()}
    rows, raw = [], None
    for name in codecs or [name for name in SETTINGS if name in there]:
        start = time.perf_counter()
        runs = [train(load_images(data, seed), dict(SETTINGS[name]), steps, seed) for seed in range(seeds)]
        row = Row(name, [one[0] for one in runs], runs[-1][1], time.perf_counter() - start)
        raw = row.mean if name == RAW else raw
        rows.append(row)
        print(f"{row.text(raw)} {row.seconds:.0f} s", flush=True)
    refused = refusal(next(params for name, params in REFUSED.items() if name in known_names()))
    print(f"refused: {refused}")
    if writes:
        write(rows, raw, data, refused)
    worse = [row.name for row in rows if raw is not None and row.name.startswith("qsgd") and row.mean < raw - PARITY]
    if worse:
        print(f"a point or more below raw: {', '.join(worse)}")
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
