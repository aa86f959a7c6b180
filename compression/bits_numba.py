"""Bits in and out for the compiled codings: most significant first, by the address of the first byte.

Addresses, not arrays: an array handed to a compiled function is counted in and out, which costs more than the work.
A reader may load 8 bytes from any bit within its budget, a writer may write 4 bytes behind its last: callers leave
`PAD` bytes behind what they hand over.
"""

from __future__ import annotations

import numpy as np

from kvstore.compression.kernels_numba import _jit as jit
from kvstore.compression.kernels_numba import _pointer_to, _words_at, carray, types, uint32

PAD = 16

_longs_at = _pointer_to(types.uint64)


@jit
def _swapped(x):  # type: ignore[no-untyped-def]
    """The 8 bytes in reverse order."""
    a, b, c = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF), np.uint64(32)
    x = ((x >> np.uint64(8)) & a) | ((x & a) << np.uint64(8))
    x = ((x >> np.uint64(16)) & b) | ((x & b) << np.uint64(16))
    return (x >> c) | (x << c)


@jit
def load(data, place):  # type: ignore[no-untyped-def]
    """64 bits from bit `place` on, the first being the highest; the last 7 may be missing."""
    return _swapped(carray(_longs_at(data + (place >> 3)), 1)[0]) << np.uint64(place & 7)


@jit
def put_many(out, at, word, count, code, length):  # type: ignore[no-untyped-def]
    """Append 1 to 48 bits without a branch; `count` < 8, before and after."""
    word = (word << np.uint64(length)) | np.uint64(code)
    count += np.int64(length)
    carray(_longs_at(out + at), 1)[0] = _swapped(word << np.uint64(64 - count))
    return at + (count >> 3), word, count & 7


@jit
def put(out, at, word, count, code, length):  # type: ignore[no-untyped-def]
    """Append a codeword of at most 32 bits; `count` < 32 bits of `word` are not written yet, `at` bytes are."""
    word = (word << np.uint64(length)) | np.uint64(code)
    count += np.int64(length)
    if count >= 32:
        count -= 32
        x = uint32(word >> np.uint64(count))
        x = uint32(
            uint32(uint32(x >> uint32(8)) & uint32(0x00FF00FF)) | uint32(uint32(x & uint32(0x00FF00FF)) << uint32(8))
        )
        carray(_words_at(out + at), 1)[0] = uint32(uint32(x >> uint32(16)) | uint32(x << uint32(16)))
        at += 4
    return at, word, count


@jit
def put_omega(out, at, word, count, k):  # type: ignore[no-untyped-def]
    """Append omega(k), in two parts where it is long."""
    code, length = np.uint64(0), 1
    while k > 1:
        size = 0
        while k >> size:
            size += 1
        code |= np.uint64(k) << np.uint64(length)
        length += size
        k = size - 1
    if length > 32:
        at, word, count = put(out, at, word, count, code >> np.uint64(32), length - 32)
        code, length = code & np.uint64(0xFFFFFFFF), 32
    return put(out, at, word, count, code, length)


@jit
def finish(out, at, word, count):  # type: ignore[no-untyped-def]
    """Write what is left; returns the number of bits in all."""
    put(out, at, word, count, 0, 32 - count)
    return 8 * at + count


@jit
def omega_at(word):  # type: ignore[no-untyped-def]
    """The number at the head of a loaded word, and its bits; the number is 0 where the code is too long."""
    k, used = np.int64(1), np.int64(0)
    while (word << np.uint64(used)) >> np.uint64(63):
        if k > 31:
            return np.int64(0), used
        size = k + 1
        k = np.int64((word << np.uint64(used)) >> np.uint64(64 - size))
        used += size
    return k, used + 1
