"""The huffman coding: a canonical code over bytes that hold two levels each (Huffman 1952; lengths at most 12).

A level z with |z| <= 7 is the nibble z mod 16, any other is the nibble 8; the first of two levels is the high nibble,
an odd stream is filled up with a level 0. The stream holds, nothing at all where it has no levels:

1. 256 bits: which bytes occur, byte 0 first; then 4 bits for each of them: the length of its codeword, 1 to 12
2. the codewords of the pairs; from 1024 pairs on they form four parts of ceil(pairs / 4) pairs, the last
   of fewer, which a decoder reads at once, and the bits of the first three parts stand in front as 32-bit numbers
3. for each level of nibble 8, in order: the sign (1 is negative) and the omega code of |z| - 7

Codewords are given out in the order of (length, byte), the first being zeros. The code is complete; a single byte has
the codeword 0. Where a length would exceed 12, all counts are halved, rounded up, and the tree is built anew.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

MOST_LENGTH = 12
SYMBOLS = 256
SPLIT = 1024
"""From so many pairs on there are four parts."""


def code_lengths(counts: list[int]) -> list[int]:
    """Length of the codeword of each byte from how often it occurs; 0 where it does not.

    Of equal counts the lower byte is joined first, and bytes before joined ones: every twin finds the same tree.
    """
    used = sorted((count, symbol) for symbol, count in enumerate(counts) if count)
    lengths = [0] * len(counts)
    if len(used) == 1:
        lengths[used[0][1]] = 1
    if len(used) < 2:
        return lengths
    heap = [(count, order) for order, (count, _) in enumerate(used)]
    parent = [0] * (2 * len(used) - 1)
    for joined in range(len(used), len(parent)):
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        parent[first[1]] = parent[second[1]] = joined
        heapq.heappush(heap, (first[0] + second[0], joined))
    depth = [0] * len(parent)
    for node in reversed(range(len(parent) - 1)):
        depth[node] = depth[parent[node]] + 1
    if max(depth) > MOST_LENGTH:
        return code_lengths([(count + 1) // 2 for count in counts])
    for order, (_, symbol) in enumerate(used):
        lengths[symbol] = depth[order]
    return lengths


def codewords(lengths: list[int]) -> dict[int, str]:
    """The canonical codeword of each byte that has one.

    Raises:
        ValueError: the lengths are not those of a complete code (or of a single byte).
    """
    used = sorted((length, symbol) for symbol, length in enumerate(lengths) if length)
    total = sum(1 << (MOST_LENGTH - length) for length, _ in used)
    if total != 1 << MOST_LENGTH and [length for length, _ in used] != [1]:
        raise ValueError("the code lengths do not form a complete code")
    words, code, last = {}, 0, 0
    for length, symbol in used:
        code <<= length - last
        words[symbol] = f"{code:0{length}b}"
        code, last = code + 1, length
    return words


def table_bits(lengths: list[int]) -> int:
    """Bits of part 1."""
    return SYMBOLS + 4 * sum(length > 0 for length in lengths)


def huffman_bits(pairs: NDArray[np.int64]) -> int:
    """Exact bits of parts 1 and 2, from how often each byte occurs."""
    counts = pairs.tolist()
    lengths = code_lengths(counts)
    split = 96 if sum(counts) >= SPLIT else 0
    return table_bits(lengths) + split + int(pairs @ np.array(lengths)) if any(counts) else 0


def pairs_of(levels: NDArray[np.int16]) -> NDArray[np.uint8]:
    """The bytes: two levels each."""
    nibbles = np.where(np.abs(levels.astype(np.int32)) <= 7, levels & 15, 8).astype(np.uint8)
    if nibbles.size % 2:
        nibbles = np.append(nibbles, np.uint8(0))
    pairs: NDArray[np.uint8] = (nibbles[::2] << np.uint8(4)) | nibbles[1::2]
    return pairs
