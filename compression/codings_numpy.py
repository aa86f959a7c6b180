"""The plain reference of the codings: text of zeros and ones. The oracle of the tests, and what serves without numba.

A variable-length code is read from left to right, bit after bit; nothing of it is done for many elements at once, so
there is no CUDA twin: levels of a device are coded on the host (`qsgd`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.codings import (
    PER_ELEMENT,
    BrokenCodeError,
    Coding,
    Counts,
    Levels,
    codeword,
    omega,
    omega_length,
)
from kvstore.compression.huffman import MOST_LENGTH, SPLIT, SYMBOLS, code_lengths, codewords, huffman_bits, pairs_of

Bytes = NDArray[np.uint8]

NAME = "numpy"


def counts(levels: Levels, s: int) -> tuple[Counts, int]:
    """How often each size |z| = 0 .. s occurs, and the bits of the pairs and their table in the huffman coding."""
    pairs = np.bincount(pairs_of(levels), minlength=SYMBOLS)
    return np.bincount(np.abs(levels.astype(np.int64)), minlength=s + 1), huffman_bits(pairs)


def sparse_bits(levels: Levels, d: int, s: int) -> int:
    """Exact bits of the sparse coding."""
    total = 0
    for start in range(0, levels.size, d):
        bucket = levels[start : start + d]
        places = np.flatnonzero(bucket)
        total += omega_length(places.size + 1)
        total += sum(omega_length(gap) for gap in np.diff(places, prepend=-1).tolist())
        total += sum(1 + omega_length(abs(z)) for z in bucket[places].tolist())
    return total


def encode(coding: Coding, levels: Levels, d: int, s: int) -> tuple[Bytes, int]:
    """The stream's bytes and its exact number of bits."""
    if coding in PER_ELEMENT:
        words = {z: codeword(coding, z, s) for z in np.unique(levels).tolist()}
        text = "".join(words[z] for z in levels.tolist())
    elif coding == Coding.ELIAS_SPARSE:
        text = "".join(_sparse(levels[start : start + d]) for start in range(0, levels.size, d))
    else:
        text = _huffman(levels)
    return np.packbits(np.frombuffer(text.encode(), np.uint8) - 48), len(text)


def decode(coding: Coding, data: Bytes, bits: int, m: int, d: int, s: int) -> Levels:
    """The m levels.

    Raises:
        BrokenCodeError: the bits are not exactly those of m levels up to s.
    """
    reader = Reader(data, bits)
    if coding == Coding.ELIAS_SPARSE:
        levels = np.zeros(m, np.int16)
        for start in range(0, m, d):
            _read_sparse(reader, levels[start : start + d], s)
    elif coding == Coding.HUFFMAN:
        levels = _read_huffman(reader, m, s)
    else:
        levels = np.array([_read_level(reader, coding, s) for _ in range(m)], np.int16)
    reader.end()
    return levels


def _sparse(bucket: Levels) -> str:
    places = np.flatnonzero(bucket)
    gaps, values = np.diff(places, prepend=-1).tolist(), bucket[places].tolist()
    words = (omega(gap) + ("1" if z < 0 else "0") + omega(abs(z)) for gap, z in zip(gaps, values, strict=True))
    return omega(places.size + 1) + "".join(words)


def _huffman(levels: Levels) -> str:
    if not levels.size:
        return ""
    pairs = pairs_of(levels)
    lengths = code_lengths(np.bincount(pairs, minlength=SYMBOLS).tolist())
    words = codewords(lengths)
    text = "".join("1" if length else "0" for length in lengths)
    text += "".join(f"{length:04b}" for length in lengths if length)
    parts = ["".join(words[pair] for pair in part) for part in _parts(pairs.tolist())]
    text += "".join(f"{len(part):032b}" for part in parts[:-1]) + "".join(parts)
    large = [z for z in levels.tolist() if abs(z) > 7]
    return text + "".join(("1" if z < 0 else "0") + omega(abs(z) - 7) for z in large)


def _parts(pairs: list[int]) -> list[list[int]]:
    quarter = -(-len(pairs) // 4) if len(pairs) >= SPLIT else len(pairs)
    return [pairs[start : start + quarter] for start in range(0, len(pairs), quarter)]


class Reader:
    """Bits from left to right, never beyond the budget."""

    def __init__(self, data: Bytes, bits: int) -> None:
        self.text = "".join(map(str, np.unpackbits(data)[:bits].tolist()))
        self.bits = bits
        self.at = 0

    def take(self, count: int) -> int:
        """The next bits as a number."""
        if self.at + count > self.bits:
            raise BrokenCodeError("a codeword runs over the end of the bits")
        self.at += count
        return int(self.text[self.at - count : self.at] or "0", 2)

    def end(self) -> None:
        """Nothing may be left over."""
        if self.at != self.bits:
            raise BrokenCodeError(f"{self.bits - self.at} bits are left over")

    def omega(self, most: int) -> int:
        """A number from 1 to `most`."""
        k = 1
        while self.take(1):
            if k > 31:
                raise BrokenCodeError("an omega codeword is too long")
            k = 1 << k | self.take(k)
        if k > most:
            raise BrokenCodeError(f"a number is {k}, at most {most} is possible")
        return k


def _read_level(reader: Reader, coding: Coding, s: int) -> int:
    sign, size = 0, 0
    if coding in (Coding.FIXED, Coding.ELIAS_DENSE):
        sign = reader.take(1)
    if coding == Coding.FIXED:
        size = reader.take(s.bit_length())
        if size > s:
            raise BrokenCodeError(f"a level is {size}, at most {s} is possible")
    elif coding == Coding.UNARY:
        while reader.take(1):
            size += 1
            if size > s:
                raise BrokenCodeError(f"a level is above {s}")
    else:
        size = reader.omega(s + 1) - 1
    if size and coding in (Coding.ELIAS_DENSE_NZ, Coding.UNARY):
        sign = reader.take(1)
    return -size if sign else size


def _read_sparse(reader: Reader, bucket: Levels, s: int) -> None:
    place = -1
    for _ in range(reader.omega(bucket.size + 1) - 1):
        place += reader.omega(bucket.size - 1 - place)
        sign = reader.take(1)
        size = reader.omega(s)
        bucket[place] = -size if sign else size


def _read_huffman(reader: Reader, m: int, s: int) -> Levels:
    if not m:
        return np.zeros(0, np.int16)
    present = [reader.take(1) for _ in range(SYMBOLS)]
    lengths = [reader.take(4) if one else 0 for one in present]
    if any(one and not 1 <= length <= MOST_LENGTH for one, length in zip(present, lengths, strict=True)):
        raise BrokenCodeError(f"a length of a codeword is not 1 to {MOST_LENGTH}")
    for symbol, length in enumerate(lengths):
        if length and any(_too_large(nibble, s) for nibble in (symbol >> 4, symbol & 15)):
            raise BrokenCodeError(f"a level is above {s}")
    try:
        symbols = {word: symbol for symbol, word in codewords(lengths).items()}
    except ValueError as error:
        raise BrokenCodeError(str(error)) from error
    parts = _parts([0] * ((m + 1) // 2))
    sizes = [reader.take(32) for _ in parts[:-1]]
    pairs = []
    for number, part in enumerate(parts):
        start = reader.at
        pairs += [_read_pair(reader, symbols) for _ in part]
        if number < len(sizes) and reader.at - start != sizes[number]:
            raise BrokenCodeError("a part does not end where the next one starts")
    nibbles = [nibble for pair in pairs for nibble in (pair >> 4, pair & 15)][:m]
    levels = np.array([nibble - 16 if nibble > 8 else nibble for nibble in nibbles], np.int16)
    for place, nibble in enumerate(nibbles):
        if nibble == 8:
            sign = reader.take(1)
            size = 7 + reader.omega(s - 7)
            levels[place] = -size if sign else size
    return levels


def _read_pair(reader: Reader, symbols: dict[str, int]) -> int:
    word = ""
    for _ in range(MOST_LENGTH):
        word += "1" if reader.take(1) else "0"
        if word in symbols:
            return symbols[word]
    raise BrokenCodeError("a codeword is not in the table")


def _too_large(nibble: int, s: int) -> bool:
    return min(nibble, 16 - nibble) > s
