"""The generator gives the published numbers, all twins the same ones, and streams that have nothing in common."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest

from kvstore.compression import philox, philox_numba
from kvstore.compression.codec import Context
from kvstore.compression.philox import Purpose, dither16_reference, dither_key, philox4x32, shared_key, splitmix64

# Random123 1.14, tests/kat_vectors, philox4x32 10: counter, key, result
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
KEY = 0x299F31D0A4093822
DITHER = [33659, 13682, 12480, 3656, 10659, 29677, 59453, 7088, 42238, 22950]  # the published vector of this project


def words_of(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    low, high = words_of(key)
    result = philox4x32(high << 32 | low, np.array(words_of(counter), np.uint32))
    assert result.tolist() == words_of(expected)


def test_splitmix64_published_values() -> None:
    # the first outputs of the reference program from state 0
    gamma = 0x9E3779B97F4A7C15
    assert [splitmix64(i * gamma % 2**64) for i in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_published_dither() -> None:
    assert dither16_reference(KEY, 3, 10).tolist() == DITHER


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 100, 5000])
def test_twins_draw_the_same(cuda_on_host: Any, n: int) -> None:
    expected = dither16_reference(KEY, 5, n)
    assert philox_numba.dither16(KEY, 5, n).tolist() == expected.tolist()
    assert philox.dither16(KEY, 5, n).tolist() == expected.tolist()
    out = np.zeros(n, np.uint16)
    cuda_on_host.library.host_dither16(
        ctypes.c_uint64(KEY), ctypes.c_uint32(5), ctypes.c_longlong(n), ctypes.c_void_p(out.ctypes.data)
    )
    assert out.tolist() == expected.tolist()


def test_words_continue_from_any_block() -> None:
    whole = philox.words(KEY, 1, 40)
    assert philox.words(KEY, 1, 18, first_block=3).tolist() == whole[12:30].tolist()


def test_streams_are_uncorrelated() -> None:
    """Workers, rounds, keys, purposes and seeds that differ in high bits only: 5 sigma, over all pairs."""
    n = 1 << 15
    contexts = [Context("w", 1, rank=1), Context("w", 1, rank=2), Context("w", 1, round=2), Context("v", 1)]
    contexts += [Context("w", 1, seed=1), Context("w", 1, seed=1 << 40), Context("w", 1, seed=1 << 62), Context(0, 1)]
    keys = [dither_key(ctx) for ctx in contexts] + [shared_key(contexts[0], purpose) for purpose in Purpose]
    assert len(set(keys)) == len(keys)
    streams = [dither16_reference(key, 0, n) / 65536 - 0.5 for key in keys]
    streams += [dither16_reference(keys[0], chunk, n) / 65536 - 0.5 for chunk in (1, 2, 256)]
    for a, b in itertools.combinations(streams, 2):
        assert abs(np.mean(a * b)) < 5 / 12 / np.sqrt(n)
    for a in streams:
        assert abs(a.mean()) < 5 / np.sqrt(12 * n)


def test_shared_numbers_do_not_depend_on_the_rank() -> None:
    one, two = Context("w", 1, rank=1), Context("w", 1, rank=2)
    assert shared_key(one, Purpose.MASK) == shared_key(two, Purpose.MASK) != dither_key(one)
