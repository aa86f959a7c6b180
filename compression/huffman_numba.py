"""The huffman coding in numba: same tree, same bits as `huffman`. Called from `codings_numba` only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.bits_numba import load, put_many
from kvstore.compression.huffman import MOST_LENGTH, SPLIT, SYMBOLS
from kvstore.compression.kernels_numba import _bytes_at, _words_at, carray, uint32
from kvstore.compression.kernels_numba import _jit as jit

MOST_SIZE = 7  # of a level in a nibble

_BLOCK = 1024  # pairs


@jit
def make_pairs(levels, pairs):  # type: ignore[no-untyped-def]
    """See `huffman.pairs_of`."""
    whole = len(levels) // 2
    nibbles = np.empty(2 * _BLOCK, np.uint8)
    twos = nibbles.view(np.uint16)
    for base in range(0, whole, _BLOCK):
        m = min(_BLOCK, whole - base)
        block, target = levels[2 * base : 2 * (base + m)], pairs[base : base + m]
        for i in range(2 * m):
            z = np.int32(block[i])
            small = z if -MOST_SIZE <= z <= MOST_SIZE else np.int32(8)
            nibbles[i] = np.uint8(small & np.int32(15))
        for j in range(m):
            two = uint32(twos[j])
            target[j] = np.uint8(uint32(two << uint32(4)) | uint32(two >> uint32(8)))
    if len(levels) % 2:
        z = np.int32(levels[len(levels) - 1])
        pairs[whole] = np.uint8(((z if -MOST_SIZE <= z <= MOST_SIZE else 8) & 15) << 4)


@jit
def count_pairs(pairs):  # type: ignore[no-untyped-def]
    """How often each byte occurs in each quarter of the pairs, with two counters: equal neighbours do not wait."""
    counts = np.zeros((4, SYMBOLS), np.int64)
    quarter = (len(pairs) + 3) // 4
    for q in range(4):
        part, row = pairs[min(q * quarter, len(pairs)) : (q + 1) * quarter], counts[q]
        spare = np.zeros(SYMBOLS, np.int64)
        whole = len(part) // 2 * 2
        for i in range(0, whole, 2):
            row[part[i]] += 1
            spare[part[i + 1]] += 1
        if whole < len(part):
            row[part[whole]] += 1
        row += spare
    return counts


@jit
def _lengths(order, counts, lengths):  # type: ignore[no-untyped-def]
    """See `huffman.code_lengths`: leaves in one queue, joined nodes in another, both in order of their counts.

    order: the bytes that occur, by (count, byte).
    """
    used = len(order)
    if used < 2:
        if used:
            lengths[order[0]] = 1
        return 1
    weight, parent = np.empty(2 * used - 1, np.int64), np.zeros(2 * used - 1, np.int64)
    for i in range(used):
        weight[i] = counts[order[i]]
    leaf, node = 0, used
    for joined in range(used, 2 * used - 1):
        total = np.int64(0)
        for _ in range(2):
            if leaf < used and (node >= joined or weight[leaf] <= weight[node]):
                one = leaf
                leaf += 1
            else:
                one = node
                node += 1
            total += weight[one]
            parent[one] = joined
        weight[joined] = total
    depth = np.zeros(2 * used - 1, np.int64)
    most = np.int64(0)
    for i in range(2 * used - 3, -1, -1):
        depth[i] = depth[parent[i]] + 1
        most = max(most, depth[i])
    for i in range(used):
        lengths[order[i]] = depth[i]
    return most


@jit
def _canonical(lengths, table):  # type: ignore[no-untyped-def]
    code = 0
    for length in range(1, MOST_LENGTH + 1):
        for symbol in range(SYMBOLS):
            if lengths[symbol] == length:
                table[symbol] = code << 8 | length
                code += 1
        code <<= 1


def lengths_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The length of each byte's codeword; see `huffman.code_lengths`."""
    lengths = np.zeros(SYMBOLS, np.int64)
    while True:
        used = np.flatnonzero(counts)
        order = np.sort(counts[used] << 8 | used) & 255
        if _lengths(order, counts, lengths) <= MOST_LENGTH:
            return lengths
        counts = (counts + 1) // 2


def code_table(lengths: NDArray[np.int64]) -> NDArray[np.uint32]:
    """code << 8 | length of each byte."""
    table = np.zeros(SYMBOLS, np.uint32)
    _canonical(lengths, table)
    return table


@jit
def write_pairs(pairs, table, out, at, word, count):  # type: ignore[no-untyped-def]
    """Append the codewords, four at a time; see `bits_numba.put_many`."""
    low, eight = np.uint64(255), np.uint64(8)
    whole = len(pairs) // 4 * 4
    for i in range(0, whole, 4):
        a, b = np.uint64(table[pairs[i]]), np.uint64(table[pairs[i + 1]])
        c, d = np.uint64(table[pairs[i + 2]]), np.uint64(table[pairs[i + 3]])
        first, second = (a >> eight) << (b & low) | b >> eight, (c >> eight) << (d & low) | d >> eight
        last = (c & low) + (d & low)
        length = (a & low) + (b & low) + last
        at, word, count = put_many(out, at, word, count, first << last | second, length)
    for i in range(whole, len(pairs)):
        a = np.uint64(table[pairs[i]])
        at, word, count = put_many(out, at, word, count, a >> eight, a & low)
    return at, word, count


@jit
def lookup_table(data, bits, s, lengths, table):  # type: ignore[no-untyped-def]
    """Read part 1 and fill the table: byte << 8 | length by the next 12 bits, 0 where no codeword is.

    Returns the place behind it, or what is wrong as a negative number.
    """
    if bits < SYMBOLS:
        return np.int64(-1)
    place, total, used = np.int64(SYMBOLS), np.int64(0), 0
    for symbol in range(SYMBOLS):
        if load(data, symbol) >> np.uint64(63):
            if place + 4 > bits:
                return np.int64(-1)
            own = np.int64(load(data, place) >> np.uint64(60))
            place += 4
            if own < 1 or own > MOST_LENGTH:
                return np.int64(-3)
            high, low = symbol >> 4, symbol & 15
            if min(high, 16 - high) > s or min(low, 16 - low) > s:
                return np.int64(-2)
            lengths[symbol] = own
            total += np.int64(1 << (MOST_LENGTH - own))
            used += 1
    if total != 1 << MOST_LENGTH and not (used == 1 and total == 1 << (MOST_LENGTH - 1)):
        return np.int64(-3)
    at = 0
    for length in range(1, MOST_LENGTH + 1):
        for symbol in range(SYMBOLS):
            if lengths[symbol] == length:
                size = 1 << (MOST_LENGTH - length)
                table[at : at + size] = symbol << 8 | length
                at += size
    return place


@jit
def _four(data, place, table):  # type: ignore[no-untyped-def]
    """Four codewords: the place behind them, their bytes, and the least length: 0 where one is not in the table."""
    low, eight, top = np.uint32(255), np.uint32(8), np.uint64(52)
    word = load(data, place)
    a = table[word >> top]
    word <<= np.uint64(a & low)
    b = table[word >> top]
    word <<= np.uint64(b & low)
    c = table[word >> top]
    word <<= np.uint64(c & low)
    d = table[word >> top]
    place += np.int64(a & low) + np.int64(b & low) + np.int64(c & low) + np.int64(d & low)
    four = uint32(
        uint32(uint32(a >> eight) | uint32(b & uint32(0xFF00)))
        | uint32(uint32(uint32(c & uint32(0xFF00)) << eight) | uint32(uint32(d & uint32(0xFF00)) << uint32(16)))
    )
    return place, four, min(min(a & low, b & low), min(c & low, d & low))


@jit
def _rest(data, bits, place, table, out, n):  # type: ignore[no-untyped-def]
    """n codewords, one by one; returns the place behind them or what is wrong as a negative number."""
    pairs = carray(_bytes_at(out), n)
    for i in range(n):
        if place > bits:
            return np.int64(-1)
        entry = table[load(data, place) >> np.uint64(52)]
        if entry == 0:
            return np.int64(-3)
        pairs[i] = np.uint8(entry >> np.uint32(8))
        place += np.int64(entry & np.uint32(255))
    return place


@jit
def read_parts(data, bits, place, table, n, out):  # type: ignore[no-untyped-def]
    """The n bytes of part 2; returns the place behind it, or what is wrong as a negative number."""
    if n < SPLIT:
        return _rest(data, bits, place, table, out, n)
    quarter = (n + 3) // 4
    p0 = place + 96
    if p0 > bits:
        return np.int64(-1)
    p1 = p0 + np.int64(load(data, place) >> np.uint64(32))
    p2 = p1 + np.int64(load(data, place + 32) >> np.uint64(32))
    p3 = p2 + np.int64(load(data, place + 64) >> np.uint64(32))
    e1, e2, e3 = p1, p2, p3
    groups, least = (n - 3 * quarter) // 4, np.uint32(255)
    o0 = carray(_words_at(out), groups)
    o1 = carray(_words_at(out + quarter), groups)
    o2 = carray(_words_at(out + 2 * quarter), groups)
    o3 = carray(_words_at(out + 3 * quarter), groups)
    for i in range(groups):
        if max(max(p0, p1), max(p2, p3)) > bits:
            return np.int64(-1)
        p0, o0[i], l0 = _four(data, p0, table)
        p1, o1[i], l1 = _four(data, p1, table)
        p2, o2[i], l2 = _four(data, p2, table)
        p3, o3[i], l3 = _four(data, p3, table)
        least = min(least, min(min(l0, l1), min(l2, l3)))
    if least == 0:
        return np.int64(-3)
    done = 4 * groups
    p0 = _rest(data, bits, p0, table, out + done, quarter - done)
    p1 = _rest(data, bits, p1, table, out + quarter + done, quarter - done)
    p2 = _rest(data, bits, p2, table, out + 2 * quarter + done, quarter - done)
    p3 = _rest(data, bits, p3, table, out + 3 * quarter + done, n - 3 * quarter - done)
    worst = min(min(p0, p1), min(p2, p3))
    if worst < 0:
        return worst
    return p3 if p0 == e1 and p1 == e2 and p2 == e3 else np.int64(-5)


@jit
def spread_pairs(pairs, levels):  # type: ignore[no-untyped-def]
    """Two levels out of each byte; nibble 8 becomes -8. Returns whether there was one."""
    found = np.int32(0)
    for i in range(len(levels)):
        pair = np.int32(pairs[i >> 1])
        nibble = (pair << np.int32(4 * (i & 1))) & np.int32(0xF0)
        z = np.int32((nibble ^ np.int32(0x80)) - np.int32(0x80)) >> np.int32(4)
        levels[i] = z
        found |= np.int32(z == np.int32(-8))
    return found != 0
