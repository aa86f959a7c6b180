"""How old a push is, and what that does to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.on_stale import OnStale
from kvstore.server.staleness import MOST, Staleness, behind
from kvstore.server.stored import JOINT, StoredChunk, StoredKey


def stored(bound: int, policy: OnStale = OnStale.BLOCK, sync: bool = False) -> tuple[StoredKey, StoredChunk]:
    key = StoredKey("w", (4,), np.dtype(np.float32), 4, sync, False, False, 1, bound, policy)
    chunk = StoredChunk("w", 0, 0, np.zeros(4, np.float32), np.zeros(4, np.float32))
    key.chunks[0] = chunk
    return key, chunk


@pytest.mark.parametrize(
    ("bound", "policy", "factor"),
    [(-1, OnStale.DROP, 1), (6, OnStale.DROP, 1), (5, OnStale.DROP, 0), (3, OnStale.SCALE, 0.5), (0, OnStale.BLOCK, 1)],
)
def test_a_push_six_updates_old(bound: int, policy: OnStale, factor: float) -> None:
    key, chunk = stored(bound, policy)
    chunk.step, chunk.seen[1] = 10, 4
    staleness = Staleness()
    assert staleness.factor(key, [chunk], 1) == factor
    assert staleness.histogram() == [(6, 1)]
    assert (staleness.dropped, staleness.scaled) == (int(factor == 0), int(factor == 0.5))


def test_the_oldest_chunk_counts_where_several_are_updated_together() -> None:
    key, chunk = stored(3, OnStale.DROP)
    other = stored(3)[1]
    chunk.step = other.step = 5
    chunk.seen[0], other.seen[0] = 5, 1
    assert Staleness().factor(key, [chunk, other], 0) == 0


def test_joint_rounds_have_no_age() -> None:
    key, chunk = stored(0, OnStale.DROP)
    chunk.step = 10
    staleness = Staleness()
    assert staleness.factor(key, [chunk], JOINT) == 1
    assert staleness.histogram() == []


def test_counting_starts_where_updates_do() -> None:
    key, chunk = stored(0, OnStale.DROP)
    chunk.seen[0] = 3
    chunk.start_counting(7)
    assert Staleness().factor(key, [chunk], 0) == 1


def test_the_histogram_is_bounded() -> None:
    key, chunk = stored(-1)
    staleness = Staleness()
    for chunk.step in (0, 5, 5, MOST, MOST + 9):
        staleness.factor(key, [chunk], 0)
    assert staleness.histogram() == [(0, 1), (5, 2), (MOST, 2)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, {1: 2, 2: 0}), ({"staleness": 3}, {2: 0}), ({"staleness": 5}, {}), ({"staleness": -1}, {}),
     ({"sync": True}, {}), ({"on_stale": OnStale.DROP}, {})],
)  # fmt: skip
def test_who_is_waited_for(change: dict[str, Any], expected: dict[int, int]) -> None:
    key, chunk = stored(2)
    chunk.pushed = {0: 5, 1: 2, 3: 3}
    for name, value in change.items():
        setattr(key, name, value)
    assert behind(key, chunk, 0, range(4)) == expected
    assert behind(key, chunk, 0, [0, 3]) == {}
