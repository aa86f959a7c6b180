"""State of all chunks out of the servers and back, in waves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore import dist_chunks
from kvstore.checkpoint import Checkpoint
from kvstore.dist import DistStore
from kvstore.dist_chunks import ChunkStates
from kvstore.optimizer import make_spec, spec_to_json

MakeJob = Callable[..., Any]


def chunks_of(store: DistStore) -> ChunkStates:
    return ChunkStates(store._link, store._keys, store.rank)


@pytest.mark.parametrize("wave", [1, 16])
def test_out_and_back(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, wave: int) -> None:
    monkeypatch.setattr(dist_chunks, "WAVE", wave)
    store = make_job(1, 2, chunk_elements=64).stores[0]
    weights = np.arange(210, dtype=np.float32).reshape(70, 3)
    store.init({"w": weights, "h": np.ones(100, np.float16)})
    chunks = chunks_of(store)
    assert chunks.optimizer() is None
    spec = spec_to_json(make_spec("sgd", learning_rate=1.0, momentum=0.5))
    chunks.install(spec)
    assert chunks.optimizer() == spec
    store.push("w", np.ones((70, 3), np.float32))
    store.pull("w")
    read = chunks.read(values=True)
    np.testing.assert_array_equal(read.values["w"], weights - 1)
    assert read.masters.keys() == {"h"} and read.masters["h"].dtype == np.float32
    assert {key: list(state) for key, state in read.state.items()} == {"w": ["momentum"]}
    assert read.state["w"]["momentum"].tolist() == [-1.0] * 210
    assert read.steps == {"w": 1, "h": 0}
    states = chunks.read(values=False)
    assert (states.values, states.masters, states.steps) == ({}, {}, read.steps)
    np.testing.assert_array_equal(states.state["w"]["momentum"], read.state["w"]["momentum"])
    store.push("w", np.ones((70, 3), np.float32))
    store.pull("w")
    chunks.write(Checkpoint(state=states.state, steps=states.steps))
    np.testing.assert_array_equal(store.pull("w"), weights - 2.5)  # values are left as they are
    chunks.write(read)
    np.testing.assert_array_equal(store.pull("w"), weights - 1)
    assert chunks.read(values=False).state["w"]["momentum"].tolist() == [-1.0] * 210
