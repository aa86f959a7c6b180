"""Messages that no worker sends: they raise nothing but our own errors and change nothing that is not theirs."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.errors import KVStoreError
from kvstore.messages import (
    Ack,
    Assign,
    AssignEntry,
    ChunkEntry,
    Declare,
    DeclareEntry,
    Failure,
    Frame,
    Message,
    Pull,
    Push,
    PushEntry,
    ReadState,
    Refuse,
    SetLearningRate,
    SetOptimizer,
    Values,
    WriteState,
)
from kvstore.on_stale import OnStale


def f(*values: float) -> Any:
    return np.array(values, np.float32)


@pytest.fixture
def w(make_shard: Callable[[], Any]) -> Any:
    """A shard that holds 'w' = [0, 0]."""
    harness = make_shard()
    assert harness.assign("w", f(0, 0)) == ["w0 ack 1"]
    return harness


BIG = 2**62


def assign(chunk: int = 0, shape: tuple[int, ...] = (2,), dtype: str = "float32", rank: int = 0) -> Assign:
    entry = AssignEntry("x", chunk, shape, dtype, 1, 0, True)
    return Assign(sequence=1, rank=rank, entries=[entry], timeout=1.0)


def write(*names: str, key: str = "w", dtype: str = "float32") -> WriteState:
    dtypes = [dtype] * len(names)
    return WriteState(sequence=1, rank=0, key=key, chunk=0, step=9, names=list(names), dtypes=dtypes)


@pytest.mark.parametrize(
    ("message", "frames"),
    [
        (Push(sequence=1, rank=0, entries=[PushEntry("w", 0, 1, "none")]), []),
        (assign(rank=1), [bytes(8)]),
        (assign(), []),
        (assign(), [bytes(7)]),
        (assign(chunk=1), [bytes(8)]),
        (assign(chunk=BIG), [b""]),
        (assign(shape=(BIG,) * 32), [bytes(256)]),
        (assign(dtype="object"), [bytes(8)]),
        (assign(dtype=""), [bytes(8)]),
        (ReadState(sequence=1, rank=0, key="w", chunk=7), []),
        (write(key="x"), []),
        (write("value"), []),
        (write("value"), [bytes(12)]),
        (write("value"), [bytes(7)]),
        (write("value", dtype="float64"), [bytes(16)]),
        (write("master"), [bytes(8)]),
        (write("value", "master"), [bytes(8), bytes(8)]),
        (write("state:momentum"), [bytes(8)]),
        (write("value", "__class__"), [bytes(8), bytes(8)]),
        (SetOptimizer(sequence=1, rank=0, turn=7, spec="{}", timeout=1.0), []),
        (SetLearningRate(sequence=1, rank=0, learning_rate=0.1), []),
        (Ack(sequences=[1]), []),
        (Values(entries=[]), []),
    ],
)
def test_what_is_wrong_raises_and_changes_nothing(w: Any, message: Message, frames: list[Frame]) -> None:
    if not isinstance(message, SetOptimizer):
        with pytest.raises(KVStoreError):
            w.send(0, message, *frames)
    else:
        (line,) = w.send(0, message, *frames)
        assert "failed 1: ProtocolError" in line
    assert w.pull(0, "w", 0) == ["w0 w@0 [0.0, 0.0]"]
    assert w.stored_keys() == ["w"]
    assert w.shard.optimizer is None
    assert w.tick(1000.0) == []


@pytest.mark.parametrize("rank", [2, 2**20])
def test_ranks_outside_the_job_are_refused(w: Any, rank: int) -> None:
    failed, _ = w.push(rank, "w", 1, f(9, 9))
    assert f"ProtocolError push of rank {rank}, the job has ranks 0 to 1" in failed
    assert w.refuse(rank, "w", 1) == [f"w{rank} ack 3"]
    w.push(0, "w", 1, f(1, 1))
    w.push(1, "w", 1, f(1, 1))
    assert w.pull(0, "w", 1) == ["w0 w@1 [2.0, 2.0]"]


def hostile(chance: random.Random) -> tuple[Message, list[Frame]]:
    """A well-formed message of any content."""
    one = chance.choice
    numbers = [0, 1, 2, 3, 255, 256, 257, 2**31, BIG]
    dtypes = ["float32", "float16", "bfloat16", "int8", "bool", "object", "complex64", "", "V8"]
    specs = ["", "{}", "null", "[" * 999, '{"name":"os:system","params":{}}', '{"name":"sgd","params":{"lr":1}}']
    key: Any = one(["w", "v", "", "x" * 100, 0, -1, 2**63 - 1])
    rank, chunk, dtype = one([0, 1, 2, 2**20]), one([0, 0, 1, BIG]), one(dtypes)
    flags = [one([True, False]) for _ in range(3)]
    staleness, on_stale = one([-1, -1, 0, 5]), one(list(OnStale))
    shape = tuple(one([0, 1, 2, 100, BIG]) for _ in range(chance.randrange(4)))
    frames: list[Frame] = [bytes(one([0, 1, 4, 8, 16, 256])) for _ in range(one([0, 1, 1, 1, 2]))]
    names = [
        one(["value", "master", "state:", "state:momentum", "kept:-1", "kept:0", "kept:", "__init__", ""])
        for _ in frames
    ]
    pushed = PushEntry(
        key,
        chunk,
        one(numbers),
        one(["none", "2bit", "ef21", "powersgd", ""]),
        one([{}, {"threshold": 0.5}, {"threshold": "x"}]),
        one([False, False, True]),
    )
    assigned = AssignEntry(
        "v", chunk, shape, dtype, one(numbers), one(numbers), flags[0], flags[1], flags[2], staleness, on_stale
    )
    declared = DeclareEntry(key, shape, dtype, one(numbers), flags[0], flags[1], one(numbers), staleness, on_stale)
    rate = one([0.1, -1.0, float("nan"), float("inf")])
    about: dict[str, Any] = {"sequence": one(numbers), "rank": rank}
    timed = {**about, "timeout": one([-1.0, 0.0, 1.0, float("inf")])}
    messages: list[Message] = [
        Push(entries=[pushed], **about),
        Pull(entries=[ChunkEntry(key, chunk, one(numbers), one(numbers))], **timed),
        Assign(entries=[assigned], **timed),
        Declare(entries=[declared], **timed),
        Refuse(rounds=[(key, one(numbers))], failure=Failure("X", "y", {"args": 1}), **about),
        WriteState(key=key, chunk=chunk, step=one(numbers), names=names, dtypes=[one(dtypes) for _ in frames], **about),
        ReadState(key=key, chunk=chunk, **about),
        SetLearningRate(learning_rate=rate, multipliers=one([None, {"w": rate}]), **about),
        SetOptimizer(turn=one(numbers), spec=one(specs), **timed),
    ]
    return one(messages), frames


@pytest.mark.parametrize("seed", range(30))
def test_hostile_messages_raise_nothing_but_our_errors(make_shard: Callable[[], Any], seed: int) -> None:
    harness = make_shard()
    harness.assign("safe", f(1, 2))
    harness.assign("w", f(0, 0))
    chance = random.Random(seed)
    for _ in range(300):
        message, frames = hostile(chance)
        with contextlib.suppress(KVStoreError):
            harness.send(0, message, *frames)
        harness.tick(harness.now + 0.5)
    assert harness.pull(0, "safe", 0) == ["w0 safe@0 [1.0, 2.0]"], f"seed {seed}"
    harness.push(0, "safe", 1, f(1, 1))
    harness.push(1, "safe", 1, f(1, 1))
    assert harness.pull(0, "safe", 1) == ["w0 safe@1 [2.0, 2.0]"], f"seed {seed}"
