"""What codecs keep, saved and loaded by whole jobs and by local stores; files that do not belong together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.checkpoint import read_checkpoint, write_checkpoint
from kvstore.dist import DistStore
from kvstore.errors import CheckpointError
from kvstore.store import KVStore

MakeJob = Callable[..., Any]
CODECS: list[dict[str, object]] = [
    {"type": "ef21", "ratio": 0.1},
    {"type": "powersgd", "rank": 2},
    {"type": "dgc", "ratio": 0.05, "warmup_stages": 0},
    {"type": "2bit", "threshold": 0.5, "momentum": 0.9},
]
SHAPE = (20, 30)


def gradient(rank: int, number: int) -> Any:
    return np.random.default_rng([rank, number]).standard_normal(SHAPE).astype(np.float32)


def begin(store: KVStore, codec: dict[str, object]) -> None:
    store.set_gradient_compression(codec)
    store.set_optimizer("sgd", learning_rate=0.1)
    store.init("w", np.zeros(SHAPE, np.float32))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: str(codec["type"]))
def test_a_saved_job_goes_on_as_if_uninterrupted(make_job: MakeJob, tmp_path: Path, codec: dict[str, object]) -> None:
    path = tmp_path / "job"

    def train(store: DistStore) -> Any:
        begin(store, codec)
        for number in range(3):
            store.pushpull("w", gradient(store.rank, number))
        store.save(path)
        store.barrier()
        return store.pushpull("w", gradient(store.rank, 3))

    wanted = make_job(2, 2, chunk_elements=64).parallel(train)

    def resume(store: DistStore) -> Any:
        begin(store, codec)
        store.load(path)
        return store.pushpull("w", gradient(store.rank, 3))

    for got in make_job(2, 3, chunk_elements=64).parallel(resume):
        np.testing.assert_array_equal(got, wanted[0])


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: str(codec["type"]))
def test_a_saved_local_store_goes_on_as_if_uninterrupted(tmp_path: Path, codec: dict[str, object]) -> None:
    first, second = kvstore.create("device"), kvstore.create("device")
    begin(first, codec)
    for number in range(3):
        first.push("w", [gradient(rank, number) for rank in range(3)])
    first.save(tmp_path / "file")
    second.set_gradient_compression(codec)
    second.load(tmp_path / "file")
    for store in (first, second):
        store.push("w", [gradient(rank, 3) for rank in range(3)])
    np.testing.assert_array_equal(second.pull("w"), first.pull("w"))
    assert (first.pull("w") != 0).any()


def test_sums_of_increments_and_the_ranks_parts_belong_together(make_job: MakeJob, tmp_path: Path) -> None:
    path = tmp_path / "job"

    def train(store: DistStore) -> None:
        begin(store, CODECS[0])
        store.pushpull("w", gradient(store.rank, 0))
        store.save(path)
        store.barrier()

    make_job(2, 1, chunk_elements=64).parallel(train)
    assert set(read_checkpoint(path).codec["w"]) == {"kept:-1"}
    assert set(read_checkpoint(f"{path}.rank1").codec["w"]) >= {"state/ef21/0/sent"}

    def load(store: DistStore) -> None:
        begin(store, CODECS[0])
        store.load(path)

    (tmp_path / "job.rank1").unlink()
    for error in make_job(2, 1, chunk_elements=64).errors(load):
        assert isinstance(error, CheckpointError)
        assert "increments" in str(error)
    (error,) = make_job(1, 1, chunk_elements=64).errors(load)
    assert isinstance(error, CheckpointError)
    assert "of 2 workers, this job has 1" in str(error)


@pytest.mark.parametrize(
    ("part", "array"),
    [("momentum", np.zeros(3, np.float32)), ("momentum", np.full(600, np.nan, np.float32)), ("other", np.zeros(600)),
     ("state/ef21/x/sent", np.zeros(600)), ("state/ef21/0", np.zeros(600))],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(make_job: MakeJob, tmp_path: Path, part: str, array: Any) -> None:
    store = make_job(1, 1, chunk_elements=64).stores[0]
    begin(store, CODECS[1])
    store.pushpull("w", gradient(0, 0))
    store.save(tmp_path / "job")
    own = read_checkpoint(tmp_path / "job.rank0")
    own.codec["w"][part] = array
    write_checkpoint(tmp_path / "job.rank0", own)
    before = store.pull("w")
    with pytest.raises(CheckpointError, match="'w'"):
        store.load(tmp_path / "job")
    np.testing.assert_array_equal(store.pull("w"), before)
    local = kvstore.create("device")
    own.values["w"], own.codec["w"] = np.zeros(SHAPE, np.float32), {f"0/{part}": array}
    write_checkpoint(tmp_path / "local", own)
    with pytest.raises(CheckpointError, match="'w'"):
        local.load(tmp_path / "local")
