"""save and load against a job in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore.checkpoint import read_checkpoint, write_checkpoint
from kvstore.dist import DistStore
from kvstore.dist_chunks import ChunkStates
from kvstore.errors import CheckpointError, ConfigError, OperationTimeoutError
from kvstore.local import LocalStore
from kvstore.optimizer import _REGISTRY, Optimizer, OptimizerParams

MakeJob = Callable[..., Any]
SHAPES: dict[Any, Any] = {"w": ((70, 3), np.float32), "h": ((100,), ml_dtypes.bfloat16), 7: ((), np.float64)}


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


def everything(store: DistStore) -> dict[Any, Any]:
    """What a load may change: values, and what this rank has not sent yet."""
    values = {key: store.pull(key).tolist() for key in SHAPES}
    return values | {("unsent", key): state(store, key) for key in SHAPES}


def state(store: DistStore, key: Any) -> dict[str, Any]:
    return {name: array.tolist() for name, array in store._keys[key].encoder.state().items()}


def refused(job: Any, call: Callable[[DistStore], object], text: str) -> None:
    """Every rank's call fails, at once and for the same reason."""
    for error in job.errors(call):
        assert isinstance(error, CheckpointError) and text in error.text, (text, error)


def test_files_that_do_not_fit_change_nothing(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(2, 2)
    job.parallel(begin)
    job.parallel(step)
    job.parallel(lambda store: store.save(tmp_path / "good"))
    saved = job.parallel(everything)
    job.parallel(step)
    before = job.parallel(everything)
    for one, other in zip(saved, before, strict=True):
        assert all(one[what] != other[what] for what in one if what not in (7, ("unsent", 7))), "nothing to change"

    damaged = bytearray((tmp_path / "good").read_bytes())
    damaged[-40] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    poisoned = read_checkpoint(tmp_path / "good.rank1")
    poisoned.residuals["w"][0] = np.nan
    foreign = read_checkpoint(tmp_path / "good.rank1")
    foreign.residuals["x"] = np.zeros(1, np.float32)
    for name, own in (("poisoned", poisoned), ("foreign", foreign)):
        (tmp_path / name).write_bytes((tmp_path / "good").read_bytes())
        write_checkpoint(tmp_path / f"{name}.rank1", own)
    for name in ("damaged", "missing", "poisoned", "foreign"):
        refused(job, partial(DistStore.load, path=tmp_path / name), name)
        assert job.parallel(everything) == before, name
    job.parallel(lambda store: store.init("more", np.zeros(1, np.float32)))
    refused(job, lambda store: store.load(tmp_path / "good"), "more")
    assert job.parallel(everything) == before
    job.parallel(lambda store: store.broadcast("w", np.ones(2, np.float32)))
    refused(job, lambda store: store.load_optimizer_states(tmp_path / "good"), "'w'")


def test_ranks_that_read_different_files_change_nothing(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(2, 1)
    job.parallel(begin)
    for name in ("0", "1"):
        job.parallel(step)
        job.parallel(lambda store, name=name: store.save(tmp_path / name))
    before = job.parallel(everything)
    refused(job, lambda store: store.load(tmp_path / str(store.rank)), "digest")
    assert job.parallel(everything) == before


WARM_UP = {"type": "2bit", "threshold": "0.5", "warmup_rounds": "2"}


def test_warm_up_is_not_repeated_after_a_load(make_job: MakeJob, tmp_path: Path) -> None:
    def push(store: DistStore) -> int:
        before = store.stats()["keys"]["w"]["sent_bytes"]
        store.pushpull("w", np.full(64, 1.0, np.float32))
        return int(store.stats()["keys"]["w"]["sent_bytes"] - before)

    def start(store: DistStore) -> None:
        store.init("w", np.zeros(64, np.float32))
        store.set_gradient_compression(WARM_UP)

    job = make_job(2, 1)
    job.parallel(start)
    job.parallel(lambda store: store.save(tmp_path / "first"))
    assert [job.parallel(push) for _ in range(3)] == [[256, 256], [256, 256], [16, 16]]
    job.parallel(lambda store: store.save(tmp_path / "third"))
    assert read_checkpoint(tmp_path / "third").rounds == {"w": 3}
    assert read_checkpoint(tmp_path / "third.rank1").rounds == {"w": 3}
    job.parallel(lambda store: store.load(tmp_path / "first"))
    assert [job.parallel(push) for _ in range(3)] == [[256, 256], [256, 256], [16, 16]], "back to the start"

    (tmp_path / "third.rank1").unlink()
    again = make_job(3, 1)
    again.parallel(start)
    again.parallel(lambda store: store.load(tmp_path / "third"))
    assert again.parallel(push) == [16, 16, 16], "also on ranks without a file of their own"
    again.parallel(lambda store: store.save(tmp_path / "fourth"))
    assert read_checkpoint(tmp_path / "fourth").rounds == {"w": 4}
    assert again.stores[0]._keys["w"].round == 1, "the protocol counts its own rounds"


def test_files_of_another_save_are_left_alone(
    make_job: MakeJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(store: DistStore) -> None:
        begin(store)
        step(store)
        store.save(tmp_path / "job")

    wide = make_job(2, 1)
    wide.parallel(start)
    assert state(wide.stores[1], "w")
    make_job(1, 1).parallel(start)
    assert (tmp_path / "job.rank1").exists(), "nobody there to remove it"
    with caplog.at_level("WARNING", "kvstore"):
        wide.parallel(lambda store: store.load(tmp_path / "job"))
    assert "job.rank1 belongs to another save" in caplog.text
    assert state(wide.stores[0], "w") and not state(wide.stores[1], "w")
    (tmp_path / "job").unlink()
    refused(wide, lambda store: store.load(tmp_path / "job"), "job")


def test_files_of_local_and_distributed_stores_load_into_each_other(make_job: MakeJob, tmp_path: Path) -> None:
    gradients = {key: np.full(shape, 0.7, dtype) for key, (shape, dtype) in SHAPES.items()}

    def prepare(store: Any) -> Any:
        store.init({key: np.ones(shape, dtype) for key, (shape, dtype) in SHAPES.items()})
        return store

    local, dist = prepare(LocalStore("device")), prepare(make_job(1, 2, chunk_elements=64).stores[0])
    for store in (local, dist):
        store.set_optimizer("nag", learning_rate=0.1, momentum=0.9)
        store.pushpull(gradients)
    local.save(tmp_path / "local")
    local.save_optimizer_states(tmp_path / "local.states")
    dist.save(tmp_path / "dist")
    dist.save_optimizer_states(tmp_path / "dist.states")
    for name in ("", ".states"):
        one, other = read_checkpoint(tmp_path / f"local{name}"), read_checkpoint(tmp_path / f"dist{name}")
        for part in ("optimizer", "optimizer_name", "steps", "rounds", "extra"):
            assert getattr(one, part) == getattr(other, part), part
        assert one.optimizer_name == "nag" and bool(one.save) == bool(other.save) == (not name)
    wanted = local.pushpull(gradients)
    for key, value in dist.pushpull(gradients).items():
        np.testing.assert_array_equal(value, wanted[key])

    for name, store in (
        ("dist", prepare(LocalStore("device"))),
        ("local", prepare(make_job(1, 3, chunk_elements=128).stores[0])),
    ):
        store.load(tmp_path / name)
        for key, value in store.pushpull(gradients).items():
            np.testing.assert_array_equal(value, wanted[key])
        store.load_optimizer_states(tmp_path / f"{name}.states")
        assert store.pull("w").tolist() == wanted["w"].tolist(), "states alone change no values"
        store.set_optimizer("sgd", momentum=0.9)
        for states in ("local.states", "dist.states"):
            with pytest.raises(CheckpointError, match="'nag', this store has 'sgd'"):
                store.load_optimizer_states(tmp_path / states)


def test_optimizer_states_of_a_whole_file_change_no_values(make_job: MakeJob, tmp_path: Path) -> None:
    store = make_job(1, 1).stores[0]
    begin(store)
    step(store)
    store.save(tmp_path / "job")
    step(store)
    before = everything(store)
    store.load_optimizer_states(tmp_path / "job")
    assert everything(store) == before
    store.save_optimizer_states(tmp_path / "states")
    assert read_checkpoint(tmp_path / "states").steps == {"w": 1, "h": 1, 7: 1}


def test_every_rank_learns_at_once_that_writing_to_the_servers_failed(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(2, 1, timeout=60.0)
    job.parallel(begin)
    job.parallel(step)
    job.parallel(lambda store: store.save(tmp_path / "job"))
    job.parallel(step)
    unsent = [state(store, "w") for store in job.stores]

    def fail(self: ChunkStates, checkpoint: Any) -> None:
        raise OperationTimeoutError("too slow today")

    with monkeypatch.context() as patch:
        patch.setattr(ChunkStates, "write", fail)
        for load in (DistStore.load, DistStore.load_optimizer_states):
            began = time.monotonic()
            errors = job.errors(lambda store, load=load: load(store, tmp_path / "job"))
            assert time.monotonic() - began < 30, "the other ranks waited for the writer"
            assert isinstance(errors[0], OperationTimeoutError), errors
            assert isinstance(errors[1], CheckpointError) and "too slow today" in errors[1].text, errors
            assert "may hold parts of it" in errors[1].text
    assert [state(store, "w") for store in job.stores] == unsent
    job.parallel(lambda store: store.load(tmp_path / "job"))  # nobody is out of step


def test_every_rank_learns_at_once_that_a_file_cannot_be_written_or_looked_for(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(2, 1, timeout=60.0)
    job.parallel(begin)
    job.parallel(step)
    began = time.monotonic()
    refused(job, lambda store: store.save(tmp_path / "none" / "job"), "cannot be written")
    refused(job, lambda store: store.save_optimizer_states(tmp_path / "none" / "job"), "cannot be written")
    (tmp_path / "own.rank1").mkdir()
    refused(job, lambda store: store.save(tmp_path / "own"), "own.rank1 cannot be written")
    (tmp_path / "own.rank1").rmdir()
    job.parallel(lambda store: store.save(tmp_path / "job"))

    exists = Path.exists

    def hidden(path: Path) -> bool:
        if path.name == "job.rank1":
            raise PermissionError(13, "Permission denied")
        return exists(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", hidden)
        refused(job, lambda store: store.load(tmp_path / "job"), "job.rank1 cannot be read: [Errno 13]")
    assert time.monotonic() - began < 50
    job.parallel(lambda store: store.load(tmp_path / "job"))


def test_what_is_left_of_a_job_can_be_saved(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(3, 1)
    job.parallel(begin)
    job.parallel(step)
    job.parallel(lambda store: store.save(tmp_path / "job"))
    job.stores.pop(0).close()
    job.parallel(lambda store: store.save(tmp_path / "job"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["job", "job.rank0", "job.rank1"], "rank 1 writes now"
    saves = [read_checkpoint(file).save for file in sorted(tmp_path.iterdir())]
    assert saves[0] == saves[2] != saves[1]
    for error in job.errors(lambda store: store.save(tmp_path / "none" / "job"))[:1]:
        assert isinstance(error, CheckpointError)


class ByNorm(Optimizer[OptimizerParams]):
    """A rule that needs each array whole."""

    whole = True

    def create_state(self, n: int, dtype: np.dtype[Any]) -> dict[str, Any]:
        return {}

    def update(self, key: Any, shape: Any, offset: int, value: Any, grad: Any, state: dict[str, Any], step: int) -> Any:
        return value - grad / np.linalg.norm(grad)


def test_an_optimizer_of_a_file_decides_how_keys_are_placed(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_REGISTRY, "norm_of_a_file", ByNorm)

    first, spread, small = (make_job(1, 2, chunk_elements=64).stores[0] for _ in range(3))
    first.set_optimizer("norm_of_a_file")
    first.init("small", np.zeros(4, np.float32))
    first.save(tmp_path / "small")
    ones = np.ones(100, np.float32)
    first.init("large", ones)
    first.save(tmp_path / "both")

    spread.init(["small", "large"], [np.zeros(4, np.float32), np.zeros(100, np.float32)])
    with pytest.raises(CheckpointError, match="needs each array whole, but key 'large' is spread"):
        spread.load(tmp_path / "both")
    assert not spread.pull("large").any()

    small.init("small", np.zeros(4, np.float32))
    small.load(tmp_path / "small")
    small.init("large", ones)
    np.testing.assert_allclose(small.pushpull("large", ones), 0.9)
