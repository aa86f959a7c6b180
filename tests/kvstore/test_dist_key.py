"""A worker's view of a key, and where pulled chunks go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.arrays import Template
from kvstore.dist_key import Destination, DistKey
from kvstore.errors import ArrayError
from kvstore.messages import ChunkEntry
from kvstore.partition import key_hash


def key(shape: tuple[int, ...] = (10, 15), dtype: Any = np.float32, **facts: Any) -> DistKey:
    given = {"chunk_elements": 64, "num_servers": 2, "rank": 1, **facts}
    return DistKey("w", Template(shape, np.dtype(dtype)), **given)


def test_chunks_and_where_they_are() -> None:
    one, home = key(), key_hash("w") % 2
    assert (one.elements, list(one.chunks)) == (150, [0, 1, 2])
    assert [one.part(chunk) for chunk in one.chunks] == [slice(0, 64), slice(64, 128), slice(128, 150)]
    assert [one.server(chunk) for chunk in one.chunks] == [home, 1 - home, home]
    assert one.servers == {0, 1}
    assert key(whole=True).servers == {home}
    assert key((3,)).servers == {home}


@pytest.mark.parametrize(("shape", "elements"), [((), 1), ((0,), 0), ((4, 0, 3), 0)])
def test_scalars_and_empty_arrays_have_one_chunk(shape: tuple[int, ...], elements: int) -> None:
    one = key(shape)
    assert (one.elements, [one.part(chunk) for chunk in one.chunks]) == (elements, [slice(0, elements)])


def test_version_holds_own_pushes_and_assignments() -> None:
    assert key(round=4, epoch=2).version(1) == ChunkEntry("w", 1, 4, 2)


def test_check() -> None:
    one = key((2,))
    one.check(np.zeros(2, np.float32), "the value to push")
    with pytest.raises(ArrayError, match="the value to push of key 'w': got shape \\(3,\\)"):
        one.check(np.zeros(3, np.float32), "the value to push")


def test_arrays_of_several_devices_are_summed_in_order() -> None:
    """float32 has no 1e8 + 1."""
    arrays = [np.array([value], np.float32) for value in (1e8, 1.0, -1e8)]
    assert key((1,)).reduce(arrays, False).tolist() == [0.0]
    assert key((1,)).reduce([arrays[0], arrays[2], arrays[1]], False).tolist() == [1.0]
    single = np.zeros((2, 2), np.float32)
    assert np.shares_memory(key((2, 2)).reduce([single], False), single)


def test_halves_are_summed_in_float32() -> None:
    arrays = [np.array([value], np.float16) for value in (2048, 1, 1)]
    total = key((1,), np.float16).reduce(arrays, False)
    assert (total.dtype, total.tolist()) == (np.float16, [2050.0])


def fill(destination: Destination, one: DistKey) -> None:
    """As the worker's thread does: chunk i is all i + 1."""
    for chunk in one.chunks:
        part = one.part(chunk)
        values = np.full(part.stop - part.start, chunk + 1, one.dtype)
        destination.chunk(chunk)[:] = values.view(np.uint8)


EXPECTED = np.array([1] * 64 + [2] * 64 + [3] * 22, np.float32).reshape(10, 15)


def test_without_out_a_new_array_is_returned() -> None:
    one = key()
    destination = Destination(one, [])
    fill(destination, one)
    result = destination.finish()
    assert np.array_equal(result, EXPECTED)
    assert result.flags.writeable


def test_contiguous_out_is_filled_in_place() -> None:
    one, out = key(), np.zeros((10, 15), np.float32)
    destination = Destination(one, [out])
    assert np.shares_memory(destination.chunk(0), out)
    fill(destination, one)
    assert destination.finish() is None
    assert np.array_equal(out, EXPECTED)


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((10, 15), np.float32, order="F"),
        np.zeros((10, 30), np.float32)[:, ::2],
        np.zeros((10, 15), ">f4"),
    ],
)
def test_any_out_is_filled_at_the_end(out: Any) -> None:
    one = key()
    destination = Destination(one, [out])
    fill(destination, one)
    assert not out.any()
    destination.finish()
    assert np.array_equal(out, EXPECTED)


def test_several_outs() -> None:
    one, outs = key(), [np.zeros((10, 15), np.float32) for _ in range(2)]
    destination = Destination(one, outs)
    fill(destination, one)
    destination.finish()
    assert all(np.array_equal(out, EXPECTED) for out in outs)
