"""What the demo's workers run: `python -m kvstore.server.demo_worker TASK DATA`, started by the launcher.

Written as a user of the store would write it. One job trains every model of the task; each epoch's figures go to
standard output, one line of JSON.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

import kvstore
from kvstore.server.demo_data import CLASSES, Images
from kvstore.server.demo_model import Weights, accuracy, loss_and_gradients, new_weights, shards
from kvstore.store import KVStore

INTERRUPTED = 130
"""Exit code after a Ctrl-C."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What to train: with every setting, with each of `seeds` (weights and the order of samples).

    settings: name -> parameters of `set_gradient_compression`, or None for raw gradients; in this order.
    batch: samples of all workers together.
    """

    settings: dict[str, dict[str, str] | None]
    seeds: list[int]
    epochs: int
    batch: int
    hidden: int
    learning_rate: float
    momentum: float


class Epoch(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="epoch"):
    """What one worker had done by the end of an epoch, since the start of that training.

    accuracy: of the test images, 0 to 1; told by rank 0 only.
    loss: mean over the epoch's samples of this worker, nats.
    pushed, pulled: bytes of this worker.
    seconds: of training, without the time for tests.
    """

    setting: str
    seed: int
    epoch: int
    rank: int
    accuracy: float | None
    loss: float
    pushed: int
    pulled: int
    seconds: float


def main(task_path: str, data_path: str) -> None:
    """Join the job and train what the task says."""
    task = msgspec.json.decode(Path(task_path).read_bytes(), type=Task)
    images = Images.load(Path(data_path))
    with kvstore.create("dist_sync") as store:
        store.set_optimizer(
            "sgd", learning_rate=task.learning_rate, momentum=task.momentum, rescale_grad=1 / task.batch
        )
        for seed in task.seeds:
            for setting in task.settings:
                for epoch in _train(store, task, images, setting, seed):
                    sys.stdout.write(f"{msgspec.json.encode(epoch).decode()}\n")
                    sys.stdout.flush()


def _train(store: KVStore, task: Task, images: Images, setting: str, seed: int) -> Iterator[Epoch]:
    """Train one model from new weights, and yield the figures of every epoch."""
    compress(store, task.settings[setting])
    train, test = (_scaled(part, images.brightest) for part in (images.train_images, images.test_images))
    weights = new_weights(train.shape[1], task.hidden, CLASSES, seed)
    keys = list(weights)
    store.broadcast(keys, list(weights.values()), out=list(weights.values()))

    before, seconds = store.stats()["total"], 0.0
    for epoch in range(1, task.epochs + 1):
        start, loss, seen = time.perf_counter(), 0.0, 0
        for mine in shards(len(train), task.batch, store.rank, store.num_workers, seed, epoch):
            more, gradients = loss_and_gradients(weights, train[mine], images.train_labels[mine])
            store.pushpull(keys, [gradients[key] for key in keys], out=list(weights.values()))
            loss, seen = loss + more, seen + len(mine)
        seconds += time.perf_counter() - start
        after = store.stats()["total"]
        yield Epoch(
            setting=setting, seed=seed, epoch=epoch, rank=store.rank,
            accuracy=accuracy(weights, test, images.test_labels) if store.rank == 0 else None,
            loss=loss / max(seen, 1),
            pushed=int(after["sent_bytes"] - before["sent_bytes"]),
            pulled=int(after["pulled_bytes"] - before["pulled_bytes"]),
            seconds=seconds,
        )  # fmt: skip


def compress(store: KVStore, params: dict[str, str] | None) -> None:
    """Set or clear compression, and exchange one small key, so that compiling kernels does not count as training."""
    if params is None:
        store.clear_gradient_compression(flush=False)
    else:
        store.set_gradient_compression(params)
    trial: Weights = {"trial": np.zeros(64, np.float32)}
    store.broadcast(trial)
    store.pushpull(trial)


def _scaled(images: NDArray[np.uint8], brightest: int) -> NDArray[np.float32]:
    return images.astype(np.float32) / np.float32(brightest)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:  # the launcher passed a Ctrl-C on, and says so
        sys.exit(INTERRUPTED)
