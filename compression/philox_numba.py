"""Philox4x32-10 in numba: the same bits as `philox`. Imported on first use only.

Compiled codecs that round stochastically call `fill_dither` for a block of elements that stays in the L1 cache.
Numba's cache of a caller does not notice changes here: delete `__pycache__` after one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.kernels_numba import _jit as jit
from kvstore.compression.kernels_numba import uint32
from kvstore.compression.philox import MULTIPLIER_0, MULTIPLIER_1, PER_BLOCK, ROUNDS, WEYL_0, WEYL_1

_M0, _M1, _W0, _W1 = np.uint64(MULTIPLIER_0), np.uint64(MULTIPLIER_1), np.uint32(WEYL_0), np.uint32(WEYL_1)
_HALF = np.uint64(32)


@jit
def fill_dither(words, key_low, key_high, chunk, first_block, blocks):  # type: ignore[no-untyped-def]
    """words[4 j .. 4 j + 3] = block first_block + j; `words` is uint32, its uint16 view are the numbers in order."""
    for j in range(blocks):
        c0, c1, c2, c3 = uint32(first_block + j), uint32(chunk), uint32(0), uint32(0)
        k0, k1 = uint32(key_low), uint32(key_high)
        for _ in range(ROUNDS):
            p0, p1 = np.uint64(c0) * _M0, np.uint64(c2) * _M1
            c0, c1, c2, c3 = (
                uint32(uint32(uint32(p1 >> _HALF) ^ c1) ^ k0),
                uint32(p1),
                uint32(uint32(uint32(p0 >> _HALF) ^ c3) ^ k1),
                uint32(p0),
            )
            k0, k1 = uint32(k0 + _W0), uint32(k1 + _W1)
        words[4 * j] = c0
        words[4 * j + 1] = c1
        words[4 * j + 2] = c2
        words[4 * j + 3] = c3


def dither16(key: int, chunk: int, n: int) -> NDArray[np.uint16]:
    """See `philox.dither16_reference`."""
    blocks = -(-n // PER_BLOCK)
    words = np.empty(4 * blocks, np.uint32)
    fill_dither(words, np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32), np.uint32(chunk), 0, blocks)
    return words.view(np.uint16)[:n]
