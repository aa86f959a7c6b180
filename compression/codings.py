"""Codewords for signed levels: what each coding writes, exact lengths, and the tables the kernels read.

Alistarh et al., "QSGD", NIPS 2017, appendix A: Elias' recursive (omega) code, dense and sparse. Bits are written most
significant first; the last byte is padded with zeros.

A stream is m levels z with |z| <= s, cut into buckets of d (the last may be shorter). Per coding it holds:

- fixed: the sign (1 is negative), then |z| in bit_length(s) bits
- elias_dense: the sign, then omega(|z| + 1)
- elias_dense_nz: omega(|z| + 1), then the sign where z is not 0
- elias_sparse: per bucket omega(count + 1), then for each level that is not 0 the omega code of its distance from the
  one before (the first is counted from index -1), the sign, omega(|z|)
- unary: |z| ones, a zero, then the sign where z is not 0; s at most 30
- huffman: see `huffman`
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Levels = NDArray[np.int16]
Counts = NDArray[np.int64]

MOST_LEVELS = 32767
MOST_UNARY = 30  # a codeword fits 32 bits
TABLE_BITS = 12  # a decoder looks up so many bits at once; longer codewords are parsed


class Coding(IntEnum):
    """How levels become bits; the number travels with the payload."""

    FIXED = 0
    ELIAS_DENSE = 1
    ELIAS_DENSE_NZ = 2
    ELIAS_SPARSE = 3
    UNARY = 4
    HUFFMAN = 5


PER_ELEMENT = (Coding.FIXED, Coding.ELIAS_DENSE, Coding.ELIAS_DENSE_NZ, Coding.UNARY)
"""One codeword per level, whatever stands beside it."""


class BrokenCodeError(ValueError):
    """Bits that no encoder writes; the codec adds the key and the rank."""


def omega(k: int) -> str:
    """Elias' omega codeword of k >= 1."""
    code = "0"
    while k > 1:
        text = f"{k:b}"
        code = text + code
        k = len(text) - 1
    return code


def omega_length(k: int) -> int:
    """Bits of `omega(k)`."""
    length = 1
    while k > 1:
        length += k.bit_length()
        k = k.bit_length() - 1
    return length


def fixed_bits(s: int) -> int:
    """Bits per level of the fixed coding."""
    return 1 + s.bit_length()


def codeword(coding: Coding, z: int, s: int) -> str:
    """What a coding of `PER_ELEMENT` writes for one level."""
    size, sign = abs(z), "1" if z < 0 else "0"
    match coding:
        case Coding.FIXED:
            return sign + f"{size:0{s.bit_length()}b}"
        case Coding.ELIAS_DENSE:
            return sign + omega(size + 1)
        case Coding.ELIAS_DENSE_NZ:
            return omega(size + 1) + (sign if z else "")
        case Coding.UNARY:
            return "1" * size + "0" + (sign if z else "")
    raise ValueError(f"{coding} does not write one codeword per level")


def codeword_length(coding: Coding, size: int, s: int) -> int:
    """Bits of one level of this size; for the sparse coding without its distance."""
    match coding:
        case Coding.FIXED:
            return fixed_bits(s)
        case Coding.ELIAS_DENSE:
            return 1 + omega_length(size + 1)
        case Coding.ELIAS_DENSE_NZ:
            return omega_length(size + 1) + (size > 0)
        case Coding.UNARY:
            return size + 1 + (size > 0)
        case Coding.ELIAS_SPARSE:
            return 1 + omega_length(size) if size else 0
    raise ValueError(f"{coding} has no length per level")


@lru_cache(maxsize=64)
def size_lengths(coding: Coding, s: int) -> Counts:
    """`codeword_length` for the sizes 0 .. s."""
    return np.array([codeword_length(coding, size, s) for size in range(s + 1)], np.int64)


def coded_bits(coding: Coding, sizes: Counts) -> int:
    """Exact bits of a coding of `PER_ELEMENT`, from how often each size 0 .. s occurs."""
    return int(sizes @ size_lengths(coding, len(sizes) - 1))


def least_bits(sizes: Counts, pairs: int, sparse: Callable[[], int], s: int) -> Coding:
    """The coding with the fewest bits, of equal ones the one with the lowest number.

    Args:
        sizes: how often each size 0 .. s occurs. pairs: bits of the codewords of pairs and of their table.
        sparse: counts the bits of the sparse coding; asked only where they could be the fewest.
    """
    bits = {coding: coded_bits(coding, sizes) for coding in PER_ELEMENT if coding != Coding.UNARY or s <= MOST_UNARY}
    bits[Coding.HUFFMAN] = pairs + escaped_bits(sizes)
    if sparse_floor(sizes) <= min(bits.values()):
        bits[Coding.ELIAS_SPARSE] = sparse()
    return min(bits, key=lambda coding: (bits[coding], coding))


def sparse_floor(sizes: Counts) -> int:
    """No sparse coding takes fewer bits: each distance takes at least one."""
    return coded_bits(Coding.ELIAS_SPARSE, sizes) + int(sizes[1:].sum())


def escaped_bits(sizes: Counts) -> int:
    """Bits of the levels that do not fit a nibble, in the huffman coding."""
    large = np.flatnonzero(sizes[8:]) + 8
    return sum(int(sizes[size]) * (1 + omega_length(int(size) - 7)) for size in large)


def most_bits(coding: Coding, m: int, s: int) -> int:
    """No stream of m levels up to s takes more bits."""
    match coding:
        case Coding.ELIAS_SPARSE:  # a count per bucket at most doubles as a distance: 3 bits and more per element
            return m * (codeword_length(coding, s, s) + 4)
        case Coding.HUFFMAN:
            escape = 1 + omega_length(s - 7) if s > 7 else 0
            return 256 * 5 + 96 + 12 * ((m + 1) // 2) + m * escape if m else 0
    return m * max(codeword_length(coding, s, s), 2)


@lru_cache(maxsize=64)
def encoder_table(coding: Coding, s: int) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Codewords and their lengths by z + s. For the sparse coding: the sign and omega(|z|), nothing for 0."""
    if coding == Coding.ELIAS_SPARSE:
        words = [("1" if z < 0 else "0") + omega(abs(z)) if z else "" for z in range(-s, s + 1)]
    else:
        words = [codeword(coding, z, s) for z in range(-s, s + 1)]
    codes = np.array([int(word or "0", 2) for word in words], np.uint32)
    return codes, np.array([len(word) for word in words], np.uint8)


@lru_cache(maxsize=64)
def decoder_table(coding: Coding, s: int) -> NDArray[np.uint32]:
    """By the next 12 bits: (z + 32768) << 8 | length of the codeword; 0 where it is longer or there is none."""
    table = np.zeros(1 << TABLE_BITS, np.uint32)
    codes, lengths = encoder_table(coding, s)
    for index in np.flatnonzero((lengths > 0) & (lengths <= TABLE_BITS)):
        length, code = int(lengths[index]), int(codes[index])
        free = TABLE_BITS - length
        table[code << free : (code + 1) << free] = (int(index) - s + 32768) << 8 | length
    return table


@lru_cache(maxsize=1)
def omega_table() -> NDArray[np.uint32]:
    """By the next 12 bits: k << 8 | length of omega(k); 0 where it is longer."""
    table = np.zeros(1 << TABLE_BITS, np.uint32)
    for k in range(1, 256):
        word = omega(k)
        if len(word) <= TABLE_BITS:
            free = TABLE_BITS - len(word)
            table[int(word, 2) << free : (int(word, 2) + 1) << free] = k << 8 | len(word)
    return table


@lru_cache(maxsize=1)
def omega_codes() -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Codewords and lengths of omega(k) for k < 4096 (nothing for 0)."""
    words = ["", *(omega(k) for k in range(1, 4096))]
    codes = np.array([int(word or "0", 2) for word in words], np.uint32)
    return codes, np.array([len(word) for word in words], np.uint8)
