"""What a server keeps: values that are replaced, never written; when a key is complete; what differs."""

from __future__ import annotations

import numpy as np

from kvstore.errors import ArrayError, MismatchError
from kvstore.messages import DeclareEntry
from kvstore.server.stored import JOINT, StoredChunk, StoredKey


def chunk(index: int = 0, size: int = 2, epoch: int = 1) -> StoredChunk:
    value = np.zeros(size, np.float32)
    return StoredChunk("w", index, index * size, value, value, epoch)


def key(expected: int = 2) -> StoredKey:
    return StoredKey("w", (4,), np.dtype(np.float32), 4, True, False, False, expected)


def test_publishing_replaces_the_value() -> None:
    one = chunk()
    before, frame = one.value, one.frame()
    one.publish(np.array([1, 2], np.float32))
    assert (before.tolist(), bytes(frame)) == ([0.0, 0.0], bytes(8))
    assert one.value is one.master
    assert bytes(one.frame()) == np.array([1, 2], "<f4").tobytes()


def test_half_precision_has_a_master_of_its_own() -> None:
    one = StoredChunk("w", 0, 0, np.zeros(1, np.float32), np.zeros(1, np.float16))
    one.publish(np.array([1 + 2.0**-20], np.float32))
    assert one.value.dtype == np.float16
    assert one.value.tolist() == [1.0]
    assert one.master.tolist() == [1 + 2.0**-20]


def test_rounds_done() -> None:
    one = chunk()
    one.round, one.pushed = 3, {1: 7}
    assert [one.done(rank) for rank in (JOINT, 0, 1)] == [3, 0, 7]


def test_key_is_complete_with_all_its_chunks_and_as_old_as_the_oldest() -> None:
    stored = key()
    assert (stored.complete, stored.epoch) == (False, 0)
    stored.chunks[0] = chunk(0, epoch=2)
    assert (stored.complete, stored.epoch) == (False, 2)
    stored.chunks[1] = chunk(1)
    assert (stored.complete, stored.epoch) == (True, 1)
    assert stored.spread


def test_key_in_one_chunk_is_not_spread() -> None:
    stored = key(expected=1)
    stored.chunks[0] = chunk(size=4)
    assert not stored.spread


def test_difference_between_ranks() -> None:
    stored = key()
    assert stored.difference(DeclareEntry("w", (4,), "float32", 1, True), 1) is None
    error = stored.difference(DeclareEntry("w", (2, 2), "float32", 1, True), 1)
    assert isinstance(error, ArrayError)
    assert (error.key, error.rank) == ("w", 1)
    error = stored.difference(DeclareEntry("w", (4,), "float32", 1, False), 1)
    assert isinstance(error, MismatchError)


def test_bytes_are_counted() -> None:
    stored = key()
    stored.count_push(4, 1)
    stored.count_push(4, 16)
    assert (stored.raw_bytes, stored.received_bytes) == (32, 17)
