"""Checks of values that rank 0 sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.errors import ArrayError, ConfigError, KeyExistsError, ProtocolError
from kvstore.messages import AssignEntry
from kvstore.on_stale import OnStale
from kvstore.server.assignment import check_assignment, new_key
from kvstore.server.stored import StoredChunk


def entry(chunk: int = 0, shape: tuple[int, ...] = (100,), dtype: str = "float32", **facts: Any) -> AssignEntry:
    return AssignEntry("w", chunk, shape, dtype, facts.pop("epoch", 1), 0, sync=True, **facts)


def test_the_bytes_of_each_chunk() -> None:
    check_assignment(entry(), bytes(256), None, 64, False)
    check_assignment(entry(chunk=1), bytes(36 * 4), None, 64, False)
    check_assignment(entry(shape=()), bytes(4), None, 64, False)
    check_assignment(entry(shape=(0, 3)), b"", None, 64, False)
    check_assignment(entry(whole=True), bytes(256), None, 64, True)


@pytest.mark.parametrize(
    ("wrong", "size", "error"),
    [
        (entry(), 255, ProtocolError),
        (entry(chunk=1), 256, ProtocolError),
        (entry(chunk=2), 0, ProtocolError),
        (entry(shape=(2**40, 2**40)), 256, ProtocolError),
        (entry(dtype="complex64"), 256, ArrayError),
    ],
)
def test_what_does_not_fit_is_refused(wrong: AssignEntry, size: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="'w'"):
        check_assignment(wrong, bytes(size), None, 64, False)


def test_spread_keys_under_an_optimizer_that_needs_them_whole() -> None:
    with pytest.raises(ConfigError, match="before init"):
        check_assignment(entry(), bytes(256), None, 64, True)
    check_assignment(entry(shape=(64,)), bytes(256), None, 64, True)


def test_a_late_init_of_a_key_that_was_overwritten() -> None:
    key = new_key(entry(), 64, 1)
    check_assignment(entry(), bytes(256), key, 64, False)
    value = np.zeros(64, np.float32)
    key.chunks[0] = StoredChunk("w", 0, 0, value, value, epoch=2)
    with pytest.raises(KeyExistsError, match="broadcast"):
        check_assignment(entry(), bytes(256), key, 64, False)


@pytest.mark.parametrize(
    ("chunk", "servers", "whole", "expected"), [(0, 1, False, 4), (1, 3, False, 1), (0, 3, False, 2), (3, 3, True, 4)]
)
def test_a_key_knows_how_many_chunks_lie_here(chunk: int, servers: int, whole: bool, expected: int) -> None:
    key = new_key(entry(chunk=chunk, shape=(200,), whole=whole), 64, servers)
    assert (key.elements, key.dtype.name, key.expected) == (200, "float32", expected)


def test_a_key_keeps_its_bound_of_staleness() -> None:
    key = new_key(entry(staleness=3, on_stale=OnStale.SCALE), 64, 1)
    assert (key.staleness, key.on_stale) == (3, OnStale.SCALE)
