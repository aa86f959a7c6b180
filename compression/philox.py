"""The random numbers of all codecs: Philox4x32-10, a counter-based generator.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A number is a pure function of a
64-bit key and a 128-bit counter, so threads, devices and twins of a kernel draw the same ones without agreeing.

The key is splitmix64 folded over (seed, purpose, rank, hash of the key's name, round); the counter is (block, chunk,
0, 0). Block b gives 8 numbers of 16 bits, the low then the high half of each of its 4 words, for the elements
8 b .. 8 b + 7 of the chunk. Dither rounds up where the number is below frac * 65536.

This file is the plain NumPy reference; `philox_numba` and `cuda/philox.cu` draw the same bits.
"""

from __future__ import annotations

import importlib
from enum import IntEnum
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.codec import Context
from kvstore.compression.hashing import key_hash
from kvstore.compression.kernels import chosen_kernels

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
PER_BLOCK = 8
"""Numbers of 16 bits that one block gives."""

_WORD, _LONG = 2**32 - 1, 2**64 - 1


class Purpose(IntEnum):
    """What numbers are drawn for; numbers of different purposes have nothing in common."""

    DITHER = 1  # stochastic rounding: differs between workers
    MASK = 2  # which elements are sent: shared by workers
    ROTATION = 3  # signs of a random rotation
    MATCHING = 4  # who exchanges with whom
    START = 5  # first guess of an iteration


def splitmix64(x: int) -> int:
    """One step of SplitMix64 (Steele, Lea, Flood 2014) from the state x: a bijection of 64-bit integers."""
    x = (x + 0x9E3779B97F4A7C15) & _LONG
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _LONG
    return x ^ (x >> 31)


def stream_key(seed: int, purpose: Purpose, rank: int, key: str | int, round: int) -> int:
    """The 64-bit key: h <- splitmix64(h ^ word) over the five words, from h = 0."""
    h = 0
    for word in (seed, int(purpose), rank, key_hash(key), round):
        h = splitmix64(h ^ (word & _LONG))
    return h


def dither_key(ctx: Context) -> int:
    """The key of one worker's rounding in one push of one key."""
    return stream_key(ctx.seed, Purpose.DITHER, ctx.rank, ctx.key, ctx.round)


def shared_key(ctx: Context, purpose: Purpose) -> int:
    """The key of numbers that all workers share in one round of one key: rank plays no part."""
    return stream_key(ctx.seed, purpose, 0, ctx.key, ctx.round)


def philox4x32(key: int, counter: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The 4 words of each counter.

    Args:
        key: 64 bits; the low half is the first word of Philox's key.
        counter: shape (..., 4).
    """
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k0, k1 = key & _WORD, key >> 32
    for _ in range(ROUNDS):
        p0, p1 = c[0] * np.uint64(MULTIPLIER_0), c[2] * np.uint64(MULTIPLIER_1)
        high0, low0 = p0 >> np.uint64(32), p0 & np.uint64(_WORD)
        high1, low1 = p1 >> np.uint64(32), p1 & np.uint64(_WORD)
        c = [high1 ^ c[1] ^ np.uint64(k0), low1, high0 ^ c[3] ^ np.uint64(k1), low0]
        k0, k1 = (k0 + WEYL_0) & _WORD, (k1 + WEYL_1) & _WORD
    return np.stack(c, axis=-1).astype(np.uint32)


def words(key: int, chunk: int, n: int, first_block: int = 0) -> NDArray[np.uint32]:
    """n words of 32 bits, those of the blocks from `first_block` on."""
    blocks = -(-n // 4)
    counter = np.zeros((blocks, 4), np.uint32)
    counter[:, 0] = np.arange(first_block, first_block + blocks, dtype=np.uint32)
    counter[:, 1] = chunk
    return philox4x32(key, counter).reshape(-1)[:n]


def dither16_reference(key: int, chunk: int, n: int) -> NDArray[np.uint16]:
    """The 16-bit numbers of the elements 0 .. n - 1 of a chunk."""
    return words(key, chunk, -(-n // 2)).astype("<u4", copy=False).view("<u2")[:n].astype(np.uint16, copy=False)


def dither16(key: int, chunk: int, n: int) -> NDArray[np.uint16]:
    """As `dither16_reference`, by the compiled kernel where there is one; for arrays of the host."""
    if chosen_kernels().NAME == "numba":
        compiled: Any = importlib.import_module("kvstore.compression.philox_numba")
        return cast("NDArray[np.uint16]", compiled.dither16(key, chunk, n))
    return dither16_reference(key, chunk, n)
