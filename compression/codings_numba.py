"""The codings in numba: same names and same bits as `codings_numpy`. Imported on first use only.

Codewords are looked up, shifted into a 64-bit register and written 32 bits at a time; a decoder looks up 12 bits at
once, four times for each 8 bytes it loads. What is read is copied behind a pad first, so that loads never leave it, and
the position is compared with the budget before each load.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.bits_numba import PAD, finish, load, omega_at, put, put_many, put_omega
from kvstore.compression.codings import (
    PER_ELEMENT,
    BrokenCodeError,
    Coding,
    Counts,
    Levels,
    decoder_table,
    encoder_table,
    most_bits,
    omega_codes,
    omega_length,
    omega_table,
)
from kvstore.compression.huffman import SPLIT, table_bits
from kvstore.compression.huffman_numba import (
    MOST_SIZE,
    code_table,
    count_pairs,
    lengths_of,
    lookup_table,
    make_pairs,
    read_parts,
    spread_pairs,
    write_pairs,
)
from kvstore.compression.kernels_numba import _address, _bytes_at, carray
from kvstore.compression.kernels_numba import _jit as jit

Bytes = NDArray[np.uint8]

NAME = "numba"

_FIXED, _DENSE, _DENSE_NZ = int(Coding.FIXED), int(Coding.ELIAS_DENSE), int(Coding.ELIAS_DENSE_NZ)
_ERRORS = {
    1: "a codeword runs over the end of the bits",
    2: "a level, a distance or a count is larger than possible",
    3: "the table of codewords is not that of a complete code",
    4: "bits are left over",
    5: "a part does not end where the next one starts",
}


@jit
def _count_sizes(levels, counts):  # type: ignore[no-untyped-def]
    for i in range(len(levels)):
        counts[abs(np.int64(levels[i]))] += 1


@jit
def _encode_each(levels, s, codes, lengths, out):  # type: ignore[no-untyped-def]
    at, word, count = 0, np.uint64(0), 0
    for i in range(len(levels)):
        index = np.int64(levels[i]) + s
        at, word, count = put(out, at, word, count, codes[index], np.int64(lengths[index]))
    return finish(out, at, word, count)


@jit
def _long_level(coding, word, s):  # type: ignore[no-untyped-def]
    """A level whose codeword the table does not hold, and its bits; 0 bits where there is none."""
    if coding == _FIXED:
        size_bits = 0
        while s >> size_bits:
            size_bits += 1
        size, used = np.int64((word << np.uint64(1)) >> np.uint64(64 - size_bits)), np.int64(size_bits + 1)
        negative = word >> np.uint64(63)
    elif coding == _DENSE:
        size, used = omega_at(word << np.uint64(1))
        size, used, negative = size - 1, used + 1, word >> np.uint64(63)
    elif coding == _DENSE_NZ:
        size, used = omega_at(word)
        negative = (word << np.uint64(used)) >> np.uint64(63)
        size, used = size - 1, used + (size > 1)
    else:
        size = np.int64(0)
        while size <= s and (word << np.uint64(size)) >> np.uint64(63):
            size += 1
        negative = (word << np.uint64(size + 1)) >> np.uint64(63)
        used = np.int64(size + 1 + (size > 0))
    if size < 0 or size > s:
        return np.int64(0), np.int64(0)
    return (-size if negative else size), np.int64(used)


@jit
def _decode_each(coding, data, bits, s, table, levels):  # type: ignore[no-untyped-def]
    place, i, m = np.int64(0), 0, len(levels)
    while i < m:
        if place > bits:
            return 1
        word = load(data, place)
        stop = min(m, i + 4)
        entry = table[word >> np.uint64(52)]
        if entry == 0:
            level, used = _long_level(coding, word, s)
            if used == 0:
                return 2
            levels[i] = level
            place += used
            i += 1
            continue
        while i < stop and entry != 0:
            used = np.int64(entry & np.uint32(255))
            levels[i] = np.int64(entry >> np.uint32(8)) - 32768
            place += used
            word <<= np.uint64(used)
            entry = table[word >> np.uint64(52)]
            i += 1
    return 0 if place == bits else (1 if place > bits else 4)


@jit
def _sparse_bits(levels, d, lengths, level_lengths):  # type: ignore[no-untyped-def]
    total = np.int64(0)
    for start in range(0, len(levels), d):
        last, held = start - 1, 0
        for i in range(start, min(start + d, len(levels))):
            if levels[i]:
                total += _omega_length(i - last, lengths) + level_lengths[abs(np.int64(levels[i]))]
                last = i
                held += 1
        total += _omega_length(held + 1, lengths)
    return total


@jit
def _omega_length(k, lengths):  # type: ignore[no-untyped-def]
    """Bits of omega(k): what precedes the number k is the code of its length less one, without its final 0."""
    if k < len(lengths):
        return lengths[k]
    size = np.int64(0)
    while k >> size:
        size += 1
    return lengths[size - 1] + size


@jit
def _encode_sparse(levels, d, s, codes, lengths, gap_codes, gap_lengths, out):  # type: ignore[no-untyped-def]
    at, word, count = 0, np.uint64(0), 0
    places = np.empty(min(d, len(levels)), np.int32)
    for start in range(0, len(levels), d):
        bucket = levels[start : start + d]
        held = 0
        for i in range(len(bucket)):  # no branch: the place is overwritten where the level is 0
            places[held] = i
            held += bucket[i] != 0
        at, word, count = put_omega(out, at, word, count, held + 1)
        last = -1
        for j in range(held):
            place = places[j]
            gap, index = place - last, np.int64(bucket[place]) + s
            last = place
            length = np.int64(lengths[index])
            if gap < len(gap_lengths) and gap_lengths[gap] + length <= 32:
                code = np.uint64(gap_codes[gap]) << np.uint64(length) | np.uint64(codes[index])
                at, word, count = put(out, at, word, count, code, gap_lengths[gap] + length)
            else:
                at, word, count = put_omega(out, at, word, count, gap)
                at, word, count = put(out, at, word, count, codes[index], length)
    return finish(out, at, word, count)


@jit
def _decode_sparse(data, bits, d, s, gaps, table, levels):  # type: ignore[no-untyped-def]
    place = np.int64(0)
    for start in range(0, len(levels), d):
        n = min(d, len(levels) - start)
        if place > bits:
            return 1
        held, used = omega_at(load(data, place))
        if held < 1 or held > n + 1:
            return 2
        place += used
        i = np.int64(start - 1)
        for _ in range(held - 1):
            if place > bits:
                return 1
            word = load(data, place)
            entry = gaps[word >> np.uint64(52)]
            if entry:
                gap, used = np.int64(entry >> np.uint32(8)), np.int64(entry & np.uint32(255))
            else:
                gap, used = omega_at(word)
            i += gap
            if gap < 1 or i >= start + n:
                return 2
            place += used
            if used > 32:  # what is left of the word may not hold the level
                if place > bits:
                    return 1
                word = load(data, place)
            else:
                word <<= np.uint64(used)
            entry = table[word >> np.uint64(52)]
            if entry:
                levels[i] = np.int64(entry >> np.uint32(8)) - 32768
                place += np.int64(entry & np.uint32(255))
            else:
                size, used = omega_at(word << np.uint64(1))
                if size < 1 or size > s:
                    return 2
                levels[i] = -size if word >> np.uint64(63) else size
                place += used + 1
    return 0 if place == bits else (1 if place > bits else 4)


@jit
def _encode_huffman(levels, pairs, counts, table, lengths, escaped, out):  # type: ignore[no-untyped-def]
    at, word, count = 0, np.uint64(0), 0
    for symbol in range(256):
        at, word, count = put(out, at, word, count, 1 if lengths[symbol] else 0, 1)
    for symbol in range(256):
        if lengths[symbol]:
            at, word, count = put(out, at, word, count, lengths[symbol], 4)
    # whole bytes first: what follows keeps less than one back
    while count >= 8:
        count -= 8
        carray(_bytes_at(out + at), 1)[0] = np.uint8(word >> np.uint64(count))
        at += 1
    if len(pairs) >= SPLIT:
        for q in range(3):
            part = np.int64(0)
            for symbol in range(256):
                part += counts[q, symbol] * lengths[symbol]
            at, word, count = put_many(out, at, word, count, part, 32)
    at, word, count = write_pairs(pairs, table, out, at, word, count)
    for i in range(len(levels) if escaped else 0):
        size = abs(np.int64(levels[i]))
        if size > MOST_SIZE:
            at, word, count = put(out, at, word, count, 1 if levels[i] < 0 else 0, 1)
            at, word, count = put_omega(out, at, word, count, size - MOST_SIZE)
    return finish(out, at, word, count)


@jit
def _decode_huffman(data, bits, s, pairs, out, levels):  # type: ignore[no-untyped-def]
    lengths, table = np.zeros(256, np.uint8), np.zeros(1 << 12, np.uint32)
    place = lookup_table(data, bits, s, lengths, table)
    if place < 0:
        return -place
    place = read_parts(data, bits, place, table, len(pairs), out)
    if place < 0:
        return -place
    escaped = spread_pairs(pairs, levels)
    if escaped:
        for i in range(len(levels)):
            if levels[i] == -8:
                if place > bits:
                    return 1
                word = load(data, place)
                size, used = omega_at(word << np.uint64(1))
                size += MOST_SIZE
                if size <= MOST_SIZE or size > s:
                    return 2
                levels[i] = -size if word >> np.uint64(63) else size
                place += used + 1
    return 0 if place == bits else (1 if place > bits else 4)


def counts(levels: Levels, s: int) -> tuple[Counts, int]:
    """See `codings_numpy.counts`."""
    sizes = np.zeros(s + 1, np.int64)
    if not levels.size:
        return sizes, 0
    pairs = np.empty((levels.size + 1) // 2, np.uint8)
    make_pairs(levels, pairs)
    found = count_pairs(pairs).sum(axis=0)
    if s <= MOST_SIZE:  # cheaper than another pass over the levels
        nibbles = found.reshape(16, 16).sum(axis=0) + found.reshape(16, 16).sum(axis=1)
        nibbles[0] -= levels.size % 2
        sizes[0], sizes[1:] = nibbles[0], nibbles[1 : s + 1] + nibbles[: 15 - s : -1]
    else:
        _count_sizes(levels, sizes)
    lengths = lengths_of(found)
    split = 96 if pairs.size >= SPLIT else 0
    return sizes, table_bits(lengths.tolist()) + split + int(found @ lengths)


def sparse_bits(levels: Levels, d: int, s: int) -> int:
    """See `codings_numpy.sparse_bits`."""
    sizes = np.zeros(s + 1, np.int64)
    sizes[1:] = encoder_table(Coding.ELIAS_SPARSE, s)[1][s + 1 :]
    return int(_sparse_bits(levels, d, omega_codes()[1].astype(np.int64), sizes))


def encode(coding: Coding, levels: Levels, d: int, s: int) -> tuple[Bytes, int]:
    """See `codings_numpy.encode`."""
    if not levels.size:
        return np.zeros(0, np.uint8), 0
    if coding == Coding.HUFFMAN:
        pairs = np.empty((levels.size + 1) // 2, np.uint8)
        make_pairs(levels, pairs)
        counts = count_pairs(pairs)
        lengths = lengths_of(counts.sum(axis=0))
        table = code_table(lengths)
        square = counts.sum(axis=0).reshape(16, 16)
        escaped = int(square[8].sum() + square[:, 8].sum())
        most = table_bits(lengths.tolist()) + 96 + int(square.reshape(-1) @ lengths)
        most += escaped * (1 + omega_length(max(s - MOST_SIZE, 1)))
        out = np.empty(most // 8 + PAD, np.uint8)
        bits = _encode_huffman(levels, pairs, counts, table, lengths, escaped > 0, _address(out))
    else:
        codes, sizes = encoder_table(coding, s)
        out = np.empty(most_bits(coding, levels.size, s) // 8 + PAD, np.uint8)
        if coding == Coding.ELIAS_SPARSE:
            bits = _encode_sparse(levels, d, s, codes, sizes, *omega_codes(), _address(out))
        else:
            bits = _encode_each(levels, s, codes, sizes, _address(out))
    return out[: -(-bits // 8)].copy(), int(bits)


def decode(coding: Coding, data: Bytes, bits: int, m: int, d: int, s: int) -> Levels:
    """See `codings_numpy.decode`."""
    levels = np.zeros(m, np.int16)
    padded = np.zeros(data.size + PAD, np.uint8)
    padded[: data.size] = data
    if coding in PER_ELEMENT:
        status = _decode_each(int(coding), _address(padded), bits, s, decoder_table(coding, s), levels)
    elif coding == Coding.ELIAS_SPARSE:
        status = _decode_sparse(_address(padded), bits, d, s, omega_table(), decoder_table(coding, s), levels)
    else:
        pairs = np.empty((m + 1) // 2, np.uint8)
        status = _decode_huffman(_address(padded), bits, s, pairs, _address(pairs), levels) if m else 4 * (bits > 0)
    if status:
        raise BrokenCodeError(_ERRORS[status])
    return levels
