"""save and load against a job in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore.checkpoint import read_checkpoint
from kvstore.dist import DistStore
from kvstore.errors import CheckpointError, ConfigError

MakeJob = Callable[..., Any]
SHAPES = {"w": ((70, 3), np.float32), "h": ((100,), ml_dtypes.bfloat16), 7: ((), np.float64)}


def begin(store: DistStore) -> None:
    store.set_optimizer("adam", learning_rate=0.1)
    store.init({key: np.ones(shape, dtype) for key, (shape, dtype) in SHAPES.items()})
    store.set_gradient_compression({"type": "2bit", "threshold": "0.5"})


def step(store: DistStore) -> dict[Any, Any]:
    gradients = {key: np.full(shape, 0.7 + store.rank, dtype) for key, (shape, dtype) in SHAPES.items()}
    result: dict[Any, Any] = store.pushpull(gradients)
    return result


def test_a_saved_job_goes_on_with_other_servers_as_if_uninterrupted(make_job: MakeJob, tmp_path: Path) -> None:
    path = tmp_path / "job"
    first = make_job(2, 1, chunk_elements=64)

    def train(store: DistStore) -> dict[Any, Any]:
        begin(store)
        for _ in range(3):
            step(store)
        store.save(path)
        store.barrier()
        return step(store)

    wanted = first.parallel(train)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["job", "job.rank0", "job.rank1"]
    assert read_checkpoint(path).steps["w"] == 3

    def resume(store: DistStore) -> dict[Any, Any]:
        begin(store)
        store.load(path)
        return step(store)

    for got, want in zip(make_job(2, 3, chunk_elements=64).parallel(resume), wanted, strict=True):
        for key in SHAPES:
            np.testing.assert_array_equal(got[key], want[key])


def test_optimizer_states_alone(make_job: MakeJob, tmp_path: Path) -> None:
    store = make_job(1, 2, chunk_elements=64).stores[0]
    with pytest.raises(ConfigError, match="no optimizer"):
        store.save_optimizer_states(tmp_path / "none")
    begin(store)
    step(store)
    store.save_optimizer_states(tmp_path / "states", dump_optimizer=True)
    saved = read_checkpoint(tmp_path / "states")
    assert saved.optimizer is not None and saved.optimizer["name"] == "adam" and saved.values == {}
    momentum = saved.state["w"]
    step(store)
    store.load_optimizer_states(tmp_path / "states")
    store.save_optimizer_states(tmp_path / "again")
    for name, array in read_checkpoint(tmp_path / "again").state["w"].items():
        np.testing.assert_array_equal(array, momentum[name])


def test_files_that_do_not_fit_change_nothing(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(2, 2)
    job.parallel(begin)
    job.parallel(lambda store: store.save(tmp_path / "good"))
    (tmp_path / "bad").write_bytes((tmp_path / "good").read_bytes()[:-1] + b"\0\0")
    before = job.stores[0].pull("w")
    for name in ("bad", "missing"):
        errors = job.errors(lambda store, name=name: store.load(tmp_path / name))
        assert all(isinstance(error, CheckpointError) for error in errors), errors
    np.testing.assert_array_equal(job.stores[1].pull("w"), before)
    job.parallel(lambda store: store.init("more", np.zeros(1, np.float32)))
    errors = job.errors(lambda store: store.load(tmp_path / "good"))
    assert all(isinstance(error, CheckpointError) and "more" in error.text for error in errors), errors
