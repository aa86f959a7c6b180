"""What pushes do to values: optimizers by chunk and whole, their failures, masters, averages, asynchronous order."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore.errors import ArrayError, PayloadError, ServerError
from kvstore.messages import PushEntry
from kvstore.optimizer import Optimizer, OptimizerParams, create_optimizer, make_spec
from kvstore.server.stored import StoredChunk, StoredKey
from kvstore.server.updates import MAX_ROUNDS_AHEAD, Updates

Array = np.ndarray[Any, Any]
WIDE: dict[str, Any] = {"float16": np.float32, "bfloat16": np.float32}


class Recording(Optimizer[OptimizerParams]):
    """value + gradient, and what it was given; raises for a gradient of 13."""

    whole = True

    def create_state(self, n: int, dtype: Any) -> dict[str, Array]:
        return {"total": np.zeros(n, dtype)}

    def update(
        self, key: Any, shape: tuple[int, ...], offset: int, value: Array, grad: Array, state: Any, step: int
    ) -> Array:
        if (grad == 13).any():
            raise ZeroDivisionError("unlucky")
        if (grad == 14).any():
            return value[:1]
        if (grad == 15).any():
            return value
        state["total"] += grad
        return value + grad


class Harness:
    """A key of some chunks and the updates of two workers."""

    def __init__(self, *chunks: int, sync: bool = True, dtype: Any = np.float32, **facts: Any) -> None:
        self.updates = Updates(2)
        self.dtype = np.dtype(dtype)
        given = {"average": False, "whole": False, "expected": len(chunks), **facts}
        self.stored = StoredKey("w", (sum(chunks),), self.dtype, sum(chunks), sync, **given)
        start = 0
        for index, size in enumerate(chunks):
            value = np.zeros(size, self.dtype)
            master = value.astype(WIDE.get(self.dtype.name, self.dtype), copy=False)
            self.stored.chunks[index] = StoredChunk("w", index, start, master, value, 1)
            start += size

    def install(self, name: str, **params: Any) -> None:
        self.updates.install(create_optimizer(make_spec(name, **params)), [self.stored])

    def record(self) -> None:
        self.updates.install(Recording(OptimizerParams(), make_spec("test")), [self.stored])

    def push(self, rank: int, number: int, value: float, chunk: int = 0) -> None:
        one = self.stored.chunks[chunk]
        data = np.full(one.value.size, value, self.dtype).tobytes()
        self.updates.push(self.stored, one, rank, PushEntry("w", chunk, number, "none"), data)
        self.stored.validate(self.updates.num_workers)

    def both(self, number: int, value: float, chunk: int = 0) -> None:
        self.push(0, number, value, chunk)
        self.push(1, number, value, chunk)

    def values(self) -> list[list[float]]:
        return [chunk.value.tolist() for chunk in self.stored.chunks.values()]


def test_without_optimizer_the_sum_is_the_value() -> None:
    harness = Harness(2)
    harness.both(1, 1.5)
    assert harness.values() == [[3.0, 3.0]]
    harness.both(2, 2.0)
    assert harness.values() == [[4.0, 4.0]]


@pytest.mark.parametrize(
    ("dtype", "pushed", "expected"),
    [
        ("float32", 1.0, 1.0),
        ("int32", -3, -3),
        ("uint8", 100, 100),
        ("int64", 7, 7),
        ("bool", 1, 1),
        ("float16", 3.0, 3.0),
    ],
)
def test_average(dtype: str, pushed: float, expected: float) -> None:
    harness = Harness(2, dtype=dtype, average=True)
    harness.both(1, pushed)
    assert harness.values() == [[expected] * 2]


def test_average_over_more_workers_than_the_type_can_count() -> None:
    harness = Harness(1, dtype="int8", average=True)
    harness.updates = Updates(300)
    for rank in range(300):
        harness.push(rank, 1, 1 if rank < 50 else 0)
    assert harness.values() == [[0]]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_keeps_a_float32_master(dtype: Any) -> None:
    """Steps too small for half precision add up."""
    harness = Harness(1, dtype=dtype)
    harness.stored.chunks[0].publish(np.full(1, 256, np.float32))
    harness.install("sgd", learning_rate=2.0**-10)
    for number in range(1, 513):
        harness.both(number, 1.0)
    assert harness.stored.chunks[0].master.tolist() == [255.0]
    assert harness.stored.chunks[0].value.dtype == dtype
    assert harness.values() == [[255.0]]


def test_overflow_of_half_precision_is_infinite_and_silent() -> None:
    harness = Harness(1, dtype=np.float16)
    harness.both(1, 60000.0)
    assert harness.values() == [[np.inf]]


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_optimizer_refuses_integers_by_name_and_rounds_go_on(dtype: str, sync: bool) -> None:
    harness = Harness(2, dtype=dtype, sync=sync)
    harness.install("sgd")
    harness.both(1, 1)
    harness.both(2, 1)
    chunk = harness.stored.chunks[0]
    assert [chunk.done(-1 if sync else rank) for rank in (0, 1)] == [2, 2]
    assert all(isinstance(error, ArrayError) for error in chunk.failures.values())
    assert len(chunk.failures) == (2 if sync else 4)
    assert harness.values() == [[0, 0]]


@pytest.mark.parametrize(
    ("pushed", "text"),
    [(6.5, "ZeroDivisionError: unlucky"), (7.0, "must return a new array of shape"), (7.5, "readers may still hold")],
)
@pytest.mark.parametrize("whole", [True, False])
def test_failing_optimizer_leaves_the_value_and_is_told(pushed: float, text: str, whole: bool) -> None:
    harness = Harness(2, 1, whole=whole)
    harness.record()
    for chunk in (0, 1):
        harness.both(1, 1.0, chunk)
        harness.both(2, pushed, chunk)
        harness.both(3, 1.0, chunk)
    assert harness.values() == [[4.0, 4.0], [4.0]]
    error = harness.stored.chunks[0].failures[2, -1]
    assert isinstance(error, ServerError)
    assert text in error.text
    assert error.key == "w"
    assert harness.stored.chunks[0].step == 2, "a failed update is none"


def test_new_optimizer_starts_afresh() -> None:
    harness = Harness(2)
    harness.record()
    harness.both(1, 1.0)
    harness.record()
    assert (harness.stored.chunks[0].state, harness.stored.chunks[0].step) == (None, 0)


# --- whole keys -------------------------------------------------------------------------------------------------------


def test_whole_key_is_updated_when_all_its_chunks_are_there() -> None:
    harness = Harness(2, 1, whole=True)
    harness.record()
    harness.both(1, 1.0)
    assert harness.values() == [[0.0, 0.0], [0.0]]
    harness.both(1, 2.0, chunk=1)
    assert harness.values() == [[2.0, 2.0], [4.0]]
    assert harness.stored.state is not None
    assert harness.stored.state["total"].tolist() == [2.0, 2.0, 4.0]


def test_rounds_that_one_chunk_has_ready_follow_at_once() -> None:
    """They waited for a push that had already come."""
    harness = Harness(2, 1, whole=True)
    harness.record()
    for number in (1, 2, 3):
        harness.both(number, 1.0)
    harness.both(2, 1.0, chunk=1)
    harness.both(1, 1.0, chunk=1)
    assert harness.values() == [[4.0, 4.0], [4.0]]
    harness.both(3, 1.0, chunk=1)
    assert harness.values() == [[6.0, 6.0], [6.0]]


def test_repeats_of_a_summed_chunk_do_not_open_its_round_again() -> None:
    harness = Harness(2, 1, whole=True)
    harness.record()
    harness.both(1, 1.0)
    harness.both(1, 9.0)
    assert harness.stored.chunks[0].open == {}
    harness.both(1, 1.0, chunk=1)
    assert harness.values() == [[2.0, 2.0], [2.0]]


def test_whole_key_names_who_is_missing_in_another_chunk() -> None:
    harness = Harness(2, 1, whole=True)
    harness.record()
    harness.both(1, 1.0)
    harness.push(0, 1, 1.0, chunk=1)
    assert harness.updates.missing(harness.stored, harness.stored.chunks[0]) == [1]


# --- asynchronous -----------------------------------------------------------------------------------------------------


def test_asynchronous_pushes_apply_at_once_each_worker_in_its_order() -> None:
    harness = Harness(1, sync=False)
    harness.install("test")
    harness.push(0, 2, 10.0)
    harness.push(0, 3, 100.0)
    assert harness.values() == [[0.0]], "the first is still to come"
    harness.push(1, 1, 1000.0)
    assert harness.values() == [[1000.0]]
    harness.push(0, 3, 999.0)
    harness.push(0, 1, 1.0)
    assert harness.values() == [[1111.0]]
    harness.push(0, 1, 1.0)
    harness.push(0, 3, 1.0)
    assert harness.values() == [[1111.0]], "repeats"


def test_asynchronous_whole_key() -> None:
    harness = Harness(1, 1, sync=False, whole=True)
    harness.record()
    harness.push(0, 1, 1.0)
    harness.push(0, 2, 1.0)
    harness.push(1, 1, 1.0, chunk=1)
    harness.push(0, 1, 1.0, chunk=1)
    assert harness.values() == [[1.0], [1.0]]
    harness.push(0, 2, 1.0, chunk=1)
    harness.push(1, 1, 1.0)
    assert harness.values() == [[3.0], [3.0]]


def test_assignment_stands_for_the_pushes_before_it() -> None:
    harness = Harness(1, sync=False)
    harness.install("test")
    harness.push(0, 2, 1.0)
    harness.push(0, 4, 10.0)
    harness.updates.skip(harness.stored, harness.stored.chunks[0], 0, 3)
    assert harness.values() == [[10.0]]
    harness.push(0, 3, 5.0)
    harness.push(0, 5, 100.0)
    assert harness.values() == [[110.0]]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_refusals_far_ahead_or_behind_are_void(sync: bool) -> None:
    harness = Harness(1, sync=sync)
    harness.install("test")
    harness.both(1, 1.0)
    chunk, error = harness.stored.chunks[0], ServerError("no")
    for rank, number in ((0, 0), (0, 1), (0, 2 + MAX_ROUNDS_AHEAD), (7, 2), (-1, 2)):
        harness.updates.refuse(harness.stored, chunk, rank, number, error)
    assert (chunk.open, chunk.failures) == ({}, {})
    assert harness.updates.obstacle(harness.stored, chunk, {}, 0) is None
    harness.updates.refuse(harness.stored, chunk, 0, 2, error)
    assert harness.updates.obstacle(harness.stored, chunk, {}, 0) is error
    harness.push(0, 2, 1.0)
    assert harness.updates.obstacle(harness.stored, chunk, {}, 0) is None


def test_refused_push_is_not_counted() -> None:
    harness = Harness(2)
    with pytest.raises(PayloadError):
        harness.updates.push(harness.stored, harness.stored.chunks[0], 0, PushEntry("w", 0, 1, "none"), b"123")
    assert (harness.stored.raw_bytes, harness.stored.received_bytes) == (0, 0)
    harness.push(0, 1, 1.0)
    assert (harness.stored.raw_bytes, harness.stored.received_bytes) == (8, 8)
