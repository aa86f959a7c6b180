"""State of a chunk out and back: exact, by name, and nothing changes when something does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.errors import CheckpointError, KVStoreError
from kvstore.messages import Frame, ReadState, State, WriteState
from kvstore.optimizer import create_optimizer, make_spec
from kvstore.server.chunk_state import read_state, write_state
from kvstore.server.stored import StoredChunk, StoredKey

MOMENTUM = create_optimizer(make_spec("sgd", momentum=0.5))
READ = ReadState(sequence=5, rank=1, key="w", chunk=0)


def key(dtype: Any = np.float32, whole: bool = False, sizes: tuple[int, ...] = (2,), expected: int = 1) -> StoredKey:
    stored = StoredKey("w", (sum(sizes),), np.dtype(dtype), sum(sizes), True, False, whole, expected)
    start = 0
    for index, size in enumerate(sizes):
        value = np.arange(start, start + size).astype(dtype)
        stored.chunks[index] = StoredChunk("w", index, start, value.astype(np.float32, copy=False), value)
        start += size
    return stored


def write(stored: StoredKey, arrays: dict[str, Any], optimizer: Any = MOMENTUM, chunk: int = 0) -> None:
    dtypes = [array.dtype.name for array in arrays.values()]
    message = WriteState(sequence=6, rank=0, key="w", chunk=chunk, step=9, names=list(arrays), dtypes=dtypes)
    frames: list[Frame] = [array.tobytes() for array in arrays.values()]
    write_state(message, frames, stored, stored.chunks[chunk], optimizer)


def read(stored: StoredKey, chunk: int = 0) -> dict[str, list[float]]:
    action = read_state("a", READ, stored.chunks[chunk], "{}")
    state = action.message
    assert isinstance(state, State)
    assert (action.to, state.sequence, state.optimizer) == ("a", 5, "{}")
    named = zip(state.names, state.dtypes, action.frames, strict=True)
    return {name: np.frombuffer(frame, dtype).tolist() for name, dtype, frame in named}


def test_out_and_back() -> None:
    stored = key()
    assert read(stored) == {"value": [0.0, 1.0]}
    write(stored, {"value": np.array([3, 4], np.float32), "state:momentum": np.array([5, 6], np.float32)})
    assert read(stored) == {"value": [3.0, 4.0], "state:momentum": [5.0, 6.0]}
    assert stored.chunks[0].step == 9
    assert stored.chunks[0].master is stored.chunks[0].value
    write(stored, {})
    assert read(stored) == {"value": [3.0, 4.0]}, "without state the optimizer starts afresh"


def test_half_precision_travels_with_its_master() -> None:
    stored = key(np.float16)
    assert read(stored) == {"value": [0.0, 1.0], "master": [0.0, 1.0]}
    write(stored, {"value": np.ones(2, np.float16), "master": np.full(2, 1.0001, np.float32)})
    assert stored.chunks[0].master.tolist() == [np.float32(1.0001)] * 2
    write(stored, {"value": np.full(2, 2, np.float16)})
    assert stored.chunks[0].master.tolist() == [2.0, 2.0]


def test_values_are_left_out_where_only_the_state_is_wanted() -> None:
    stored = key(np.float16)
    write(stored, {"state:momentum": np.array([5, 6], np.float32)})
    wanted = ReadState(sequence=5, rank=1, key="w", chunk=0, values=False)
    action = read_state("a", wanted, stored.chunks[0], None)
    assert isinstance(action.message, State)
    assert (action.message.names, len(action.frames)) == (["state:momentum"], 1)


def test_optimizer_state_is_copied_out() -> None:
    stored = key()
    write(stored, {"state:momentum": np.ones(2, np.float32)})
    frames = read_state("a", READ, stored.chunks[0], None).frames
    state = stored.chunks[0].state
    assert state is not None
    state["momentum"][:] = 7
    assert np.frombuffer(frames[1], np.float32).tolist() == [1.0, 1.0]


def test_state_of_a_whole_key_is_one_array() -> None:
    stored = key(whole=True, sizes=(2, 1), expected=2)
    write(stored, {"state:momentum": np.array([9], np.float32)}, chunk=1)
    write(stored, {"state:momentum": np.array([7, 8], np.float32)}, chunk=0)
    assert stored.state is not None
    assert stored.state["momentum"].tolist() == [7.0, 8.0, 9.0]
    assert read(stored, 1)["state:momentum"] == [9.0]


F32 = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("arrays", "optimizer", "text"),
    [
        ({"value": np.zeros(3, np.float32)}, MOMENTUM, "value has 3 elements of float32, here it has 2 of float32"),
        ({"value": np.zeros(2, np.float64)}, MOMENTUM, "value has 2 elements of float64"),
        ({"value": F32, "other": F32}, MOMENTUM, "unknown parts ['other']"),
        ({"value": F32, "state:variance": F32}, MOMENTUM, "the optimizer has no state 'variance'"),
        ({"value": F32, "state:momentum": np.zeros(1, np.float32)}, MOMENTUM, "momentum has 1 elements"),
        ({"value": F32, "state:momentum": F32}, None, "optimizer state, but no optimizer is set"),
        ({"value": F32, "master": F32}, MOMENTUM, "a master goes with a half-precision value"),
        ({"master": F32}, MOMENTUM, "a master goes with a half-precision value"),
    ],
)
def test_what_does_not_fit_changes_nothing(arrays: dict[str, Any], optimizer: Any, text: str) -> None:
    stored = key()
    with pytest.raises(CheckpointError) as caught:
        write(stored, arrays, optimizer)
    assert text in caught.value.text
    assert caught.value.key == "w"
    assert read(stored) == {"value": [0.0, 1.0]}
    assert (stored.chunks[0].step, stored.chunks[0].state) == (0, None)


@pytest.mark.parametrize(
    ("names", "dtypes", "frames"),
    [
        (["value"], [], [bytes(8)]),
        (["value"], ["float32"], []),
        (["value"], ["float32"], [bytes(7)]),
        (["value"], ["O"], [bytes(8)]),
    ],
)
def test_malformed_message(names: list[str], dtypes: list[str], frames: list[Frame]) -> None:
    stored = key()
    message = WriteState(sequence=6, rank=0, key="w", chunk=0, step=9, names=names, dtypes=dtypes)
    with pytest.raises(KVStoreError):
        write_state(message, frames, stored, stored.chunks[0], None)
    assert read(stored) == {"value": [0.0, 1.0]}


def test_whole_key_that_lacks_chunks_allocates_nothing() -> None:
    stored = key(whole=True, expected=2**40)
    stored.elements = 2**60
    with pytest.raises(CheckpointError, match="not all of its chunks have a value"):
        write(stored, {"state:momentum": F32})
