"""Every coding: the published codewords and test vectors, both twins bit for bit, exact lengths, hostile bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.compression import codings, codings_numba, codings_numpy
from kvstore.compression.codings import (
    MOST_UNARY,
    PER_ELEMENT,
    BrokenCodeError,
    Coding,
    coded_bits,
    escaped_bits,
    least_bits,
    most_bits,
    omega,
    omega_length,
)

TWINS = (codings_numpy, codings_numba)
WORDS = {1: "0", 2: "100", 3: "110", 4: "101000", 5: "101010", 6: "101100", 7: "101110", 8: "1110000"}
WORDS |= {15: "1111110", 16: "10100100000", 17: "10100100010", 31: "10100111110", 32: "101011000000"}
WORDS |= {100: "1011011001000", 1000: "11100111111010000"}
VECTOR = np.array([0, 1, -2, 0, 0, 3, -1], np.int16)
SETTINGS = settings(deadline=None, max_examples=60)


def read_omega(text: str) -> tuple[int, int]:
    """The rule of the paper, word for word: the number, and the bits it took."""
    k, at = 1, 0
    while text[at] == "1":
        k, at = int(text[at : at + k + 1], 2), at + k + 1
    return k, at + 1


def sample(rng: np.random.Generator, m: int, s: int) -> Any:
    scale = rng.choice([0.3, 1, s / 3, s])
    return np.clip(np.rint(rng.standard_normal(m) * scale), -s, s).astype(np.int16)


def possible(s: int) -> list[Coding]:
    return [coding for coding in Coding if coding != Coding.UNARY or s <= MOST_UNARY]


@pytest.mark.parametrize(("k", "word"), WORDS.items())
def test_omega_codewords(k: int, word: str) -> None:
    assert omega(k) == word
    assert omega_length(k) == len(word)


def test_omega_is_read_back() -> None:
    numbers = [*range(1, 5000), *range(5000, 10**6, 997), 10**6]
    numbers += [int(k) for k in np.random.default_rng(0).integers(1, 2**63, 2000)]
    for k in numbers:
        assert read_omega(omega(k) + "1010") == (k, omega_length(k))


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(
    ("coding", "data", "bits"),
    [
        (Coding.ELIAS_DENSE, "13814600", 25),
        (Coding.ELIAS_DENSE_NZ, "469424", 22),
        # omega(4 + 1), the count, and then the published 20 bits 833320
        (Coding.ELIAS_SPARSE, f"{int('101010' + f'{0x83332:020b}' + '000000', 2):08x}", 26),
        (Coding.UNARY, "4d3940", 18),
        (Coding.FIXED, "0700e8", 21),
    ],
)
def test_published_vector(twin: Any, coding: Coding, data: str, bits: int) -> None:
    out, count = twin.encode(coding, VECTOR, 100, 3)
    assert (out.tobytes().hex(), count) == (data, bits)
    assert twin.decode(coding, out, count, 7, 100, 3).tolist() == VECTOR.tolist()


@pytest.mark.parametrize("s", [1, 2, 7, 8, 23, 30, 127, 128, 255, 256, 32767])
def test_twins_write_the_same_bits_and_read_them_back(s: int, rng: np.random.Generator) -> None:
    for m, d in [(0, 4), (1, 1), (2, 1), (5, 3), (64, 64), (333, 2000), (2051, 512), (4099, 5000)]:
        levels = sample(rng, m, s)
        sizes, pairs = codings_numpy.counts(levels, s)
        found, bits = codings_numba.counts(levels, s)
        assert (found.tolist(), bits) == (sizes.tolist(), pairs)
        exact = {}
        for coding in possible(s):
            (data, bits), (other, same) = (twin.encode(coding, levels, d, s) for twin in TWINS)
            assert (other.tobytes(), same) == (data.tobytes(), bits)
            assert bits <= most_bits(coding, m, s)
            for twin in TWINS:
                assert twin.decode(coding, data, bits, m, d, s).tobytes() == levels.tobytes()
            exact[coding] = bits
        assert all(coded_bits(coding, sizes) == exact[coding] for coding in possible(s) if coding in PER_ELEMENT)
        assert pairs + escaped_bits(sizes) == exact[Coding.HUFFMAN]
        assert {twin.sparse_bits(levels, d, s) for twin in TWINS} == {exact[Coding.ELIAS_SPARSE]}
        best = least_bits(sizes, pairs, lambda: exact[Coding.ELIAS_SPARSE], s)  # noqa: B023
        assert exact[best] == min(exact.values())


@pytest.mark.parametrize("s", [1, 300])
def test_long_gaps_and_counts(s: int) -> None:
    """Distances beyond every table, in buckets of a million elements."""
    levels = np.zeros(1_000_003, np.int16)
    levels[[0, 4094, 8190, 12287, 600_000, 1_000_002]] = [1, -1, s, -s, 1, s]
    out = [twin.encode(Coding.ELIAS_SPARSE, levels, 1_000_000, s) for twin in TWINS]
    assert out[0][0].tobytes() == out[1][0].tobytes()
    for twin in TWINS:
        assert twin.decode(Coding.ELIAS_SPARSE, *out[0], levels.size, 1_000_000, s).tobytes() == levels.tobytes()
        assert twin.sparse_bits(levels, 1_000_000, s) == out[0][1]


# levels that are all ones do not loop and take no memory: 64 one bits begin no codeword
@SETTINGS
@example(data=b"\xff" * 8, cut=0, m=3, d=2, s=7)
@example(data=b"\xff" * 80, cut=0, m=2050, d=2, s=32767)
@given(
    data=st.binary(max_size=200),
    cut=st.integers(0, 7),
    m=st.integers(0, 60),
    d=st.integers(1, 70),
    s=st.sampled_from([1, 5, 7, 9, 30, 127, 32767]),
)
def test_hostile_bits_are_refused_alike(data: bytes, cut: int, m: int, d: int, s: int) -> None:
    bits, array = max(8 * len(data) - cut, 0), np.frombuffer(data, np.uint8)
    for coding in possible(s):
        results = []
        for twin in TWINS:
            try:
                levels: Any = twin.decode(coding, array, bits, m, d, s)
                assert (np.abs(levels.astype(int)) <= s).all()
                results.append(levels.tobytes())
            except BrokenCodeError:
                results.append(None)
        assert results[0] == results[1], coding


@SETTINGS
@given(seed=st.integers(0, 2**32), m=st.integers(1, 3000), s=st.sampled_from([3, 7, 23, 200]), flips=st.integers(1, 3))
def test_damaged_bits_are_refused_alike(seed: int, m: int, s: int, flips: int) -> None:
    rng = np.random.default_rng(seed)
    levels, d = sample(rng, m, s), int(rng.integers(1, m + 5))
    for coding in possible(s):
        data, bits = codings_numba.encode(coding, levels, d, s)
        damaged = data.copy()
        for _ in range(flips):
            damaged[rng.integers(data.size)] ^= 1 << rng.integers(8)
        for budget in (bits, max(bits - int(rng.integers(1, 9)), 0)):
            results = []
            for twin in TWINS:
                try:
                    results.append(twin.decode(coding, damaged[: -(-budget // 8)], budget, m, d, s).tobytes())
                except BrokenCodeError:
                    results.append(None)
            assert results[0] == results[1], coding


def test_too_long_codes_stop_at_once() -> None:
    for twin in TWINS:
        for coding in (Coding.ELIAS_DENSE, Coding.ELIAS_DENSE_NZ, Coding.ELIAS_SPARSE):
            with pytest.raises(BrokenCodeError):
                twin.decode(coding, np.full(4096, 255, np.uint8), 8 * 4096, 10, 10, 32767)


def test_a_coding_of_pairs_has_no_codeword_per_level() -> None:
    with pytest.raises(ValueError, match="codeword per level"):
        codings.codeword(Coding.HUFFMAN, 1, 7)
