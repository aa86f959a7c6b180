"""The Huffman code: optimal, canonical, limited to 12 bits, the same tree in both twins."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.compression import codings_numba, codings_numpy, huffman_numba
from kvstore.compression.codings import BrokenCodeError, Coding
from kvstore.compression.huffman import MOST_LENGTH, SPLIT, code_lengths, codewords, pairs_of


def test_known_code() -> None:
    counts = [0] * 256
    counts[1], counts[2], counts[3], counts[4] = 8, 4, 2, 2
    lengths = code_lengths(counts)
    assert {symbol: length for symbol, length in enumerate(lengths) if length} == {1: 1, 2: 2, 3: 3, 4: 3}
    assert codewords(lengths) == {1: "0", 2: "10", 3: "110", 4: "111"}


def test_one_byte_and_none() -> None:
    assert code_lengths([0] * 256) == [0] * 256
    assert codewords(code_lengths([0, 5] + [0] * 254)) == {1: "0"}


@pytest.mark.parametrize("kind", ["uniform", "normal", "fibonacci", "equal", "two"])
def test_twins_build_the_same_code(kind: str, rng: np.random.Generator) -> None:
    counts = np.zeros(256, np.int64)
    if kind == "uniform":
        counts[:] = rng.integers(0, 1000, 256)
    elif kind == "normal":
        counts += np.bincount(np.clip(rng.normal(128, 9, 100_000), 0, 255).astype(int), minlength=256)
    elif kind == "fibonacci":  # the deepest tree there is
        counts[:60] = [round(1.618**i) for i in range(60)]
    elif kind == "equal":
        counts[::3] = 7
    else:
        counts[[3, 200]] = 1, 10**9
    lengths = code_lengths(counts.tolist())
    assert huffman_numba.lengths_of(counts).tolist() == lengths
    assert max(lengths) <= MOST_LENGTH
    words = codewords(lengths)
    table = huffman_numba.code_table(np.array(lengths))
    assert {s: f"{table[s] >> 8:0{table[s] & 255}b}" for s in words} == words
    if kind != "fibonacci":  # within a bit of the entropy, and never below it
        p = counts[counts > 0] / counts.sum()
        mean = sum(count * length for count, length in zip(counts.tolist(), lengths, strict=True)) / counts.sum()
        assert -(p * np.log2(p)).sum() <= mean + 1e-9 <= -(p * np.log2(p)).sum() + 1


def test_incomplete_codes_are_refused() -> None:
    for lengths in ([1, 2], [1, 1, 1], [2], [12] * 256):
        with pytest.raises(ValueError, match="complete"):
            codewords(lengths + [0] * (256 - len(lengths)))


def test_pairs() -> None:
    assert pairs_of(np.array([1, -1, 8, -7, 0], np.int16)).tolist() == [0x1F, 0x89, 0x00]


@pytest.mark.parametrize("pairs", [SPLIT - 1, SPLIT, SPLIT + 1, SPLIT + 2, SPLIT + 3, 5000])
def test_parts(pairs: int, rng: np.random.Generator) -> None:
    """Four parts from 1024 pairs on; a part that ends elsewhere is refused."""
    levels = rng.integers(-7, 8, 2 * pairs).astype(np.int16)
    data, bits = codings_numba.encode(Coding.HUFFMAN, levels, 64, 7)
    for twin in (codings_numpy, codings_numba):
        assert twin.decode(Coding.HUFFMAN, data, bits, levels.size, 64, 7).tobytes() == levels.tobytes()
        if pairs >= SPLIT:
            used = np.unpackbits(data)[:256].sum()
            damaged = np.unpackbits(data)
            damaged[256 + 4 * used + 31] ^= 1  # the last bit of the first part's size
            with pytest.raises(BrokenCodeError):
                twin.decode(Coding.HUFFMAN, np.packbits(damaged), bits, levels.size, 64, 7)
