"""The QSGD operator in numba: same bits as `qsgd_numpy`. Imported on first use only.

A bucket's norm first, then blocks of 512 elements in a scratch that stays in the L1 cache: the random numbers, one
branch-free loop over the elements, and for 4 bits a loop that packs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.codings import Coding, Levels
from kvstore.compression.codings_numba import encode
from kvstore.compression.kernels_numba import (
    _AHEAD,
    _address,
    _bytes_at,
    _floats_at,
    _prefetch_read,
    _prefetch_write,
    _readable,
    _words_at,
    _writable,
    carray,
    float32,
    uint8,
    uint32,
)
from kvstore.compression.kernels_numba import _jit as jit
from kvstore.compression.philox_numba import fill_dither

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

NAME = "numba"

_FLOAT = np.dtype(np.float32)
_BLOCK = 512
_LANES = 16
_LARGEST = float(np.finfo(np.float32).max)


@jit
def _max_norm(x, n):  # type: ignore[no-untyped-def]
    bits = carray(_words_at(x), n)
    largest = uint32(0)
    for i in range(n):
        largest = max(largest, uint32(bits[i] & uint32(0x7FFFFFFF)))
    return largest


@jit
def _l2_norm(x, n, lanes):  # type: ignore[no-untyped-def]
    values = carray(_floats_at(x), n)
    lanes[:] = 0
    whole = n // _LANES * _LANES
    for base in range(0, whole, _LANES):
        row = values[base : base + _LANES]
        for lane in range(_LANES):
            one = np.float64(row[lane])
            lanes[lane] += one * one
    for i in range(whole, n):
        one = np.float64(values[i])
        lanes[i - whole] += one * one
    half = _LANES // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[half + lane]
        half //= 2
    return float32(min(np.sqrt(lanes[0]), _LARGEST))


@jit
def _quantise(address, n, d, s, l2, key, chunk, norms, levels, packed, bits):  # type: ignore[no-untyped-def]
    """bits: 0 writes int16 levels, 4 and 8 write packed codes. Returns the number of levels."""
    x = carray(_floats_at(address), n)
    bit_norms = norms.view(np.uint32)
    low, high = uint32(key), uint32(key >> np.uint64(32))
    words = np.empty(_BLOCK // 2 + 8, np.uint32)
    numbers = words.view(np.uint16)
    codes = np.empty(_BLOCK + 8, np.uint8)
    fours = codes.view(np.uint32)
    lanes = np.empty(_LANES)
    top, step = float32(s), float32(65536)
    sign = uint32(1 << max(bits - 1, 0))
    m = 0
    for bucket in range(len(norms)):
        first, stop = bucket * d, min(bucket * d + d, n)
        for line in range(4 * first + _AHEAD, 4 * min(stop, first + 4 * _BLOCK) + _AHEAD, 64):
            _prefetch_read(address + line)
        if l2:
            norms[bucket] = _l2_norm(address + 4 * first, stop - first, lanes)
        else:
            bit_norms[bucket] = _max_norm(address + 4 * first, stop - first)
        nu = norms[bucket]
        if nu == float32(0):
            continue
        for start in range(first, stop, _BLOCK):
            size = min(_BLOCK, stop - start)
            skip = start & 7
            fill_dither(words, low, high, chunk, start >> 3, (size + skip + 7) >> 3)
            block, dither = x[start : start + size], numbers[skip : skip + size]
            if bits == 0:
                target = levels[m : m + size]
                for i in range(size):
                    a = min(abs(block[i]) / nu * top, top)
                    whole = np.int32(a)
                    up = float32(dither[i]) < (a - float32(whole)) * step
                    level = np.int32(whole + np.int32(up))
                    target[i] = -level if block[i] < float32(0) else level
            else:
                spot = packed[m : m + size] if bits == 8 else codes[:size]
                for i in range(size):
                    a = min(abs(block[i]) / nu * top, top)
                    whole = np.int32(a)
                    up = float32(dither[i]) < (a - float32(whole)) * step
                    level = uint32(whole + np.int32(up))
                    flag = sign if (block[i] < float32(0)) & (level > uint32(0)) else uint32(0)
                    spot[i] = uint8(level | flag)
                if bits == 4:
                    codes[size] = 0
                    pairs = packed[m // 2 : m // 2 + (size + 1) // 2].view(np.uint8)
                    halves = len(pairs) // 2
                    for j in range(halves):
                        four = fours[j]
                        two = uint32(uint32(four << uint32(4)) | uint32(four >> uint32(8)))
                        pairs[2 * j] = uint8(two)
                        pairs[2 * j + 1] = uint8(two >> uint32(16))
                    if len(pairs) & 1:
                        pairs[2 * halves] = uint8(codes[4 * halves] << 4 | codes[4 * halves + 1])
            m += size
    return m


@jit
def _dequantise(levels, norms, n, d, s, address, add):  # type: ignore[no-untyped-def]
    out = carray(_floats_at(address), n)
    top = float32(s)
    at = 0
    for bucket in range(len(norms)):
        target = out[bucket * d : min(bucket * d + d, n)]
        nu = norms[bucket]
        if nu == float32(0):
            if not add:
                target[:] = float32(0)
            continue
        values = levels[at : at + len(target)]
        at += len(target)
        if add:
            for i in range(len(target)):
                target[i] += nu * (float32(values[i]) / top)
        else:
            for i in range(len(target)):
                target[i] = nu * (float32(values[i]) / top)


@jit
def _decode_fixed(data, norms, n, d, bits, address, add):  # type: ignore[no-untyped-def]
    out = carray(_floats_at(address), n)
    # level / s without a division: 16 bits of 1 / s times 7 bits of the level are exact, so the sum is rounded once
    s, scale = (1 << (bits - 1)) - 1, 1 << (18 if bits == 4 else 22)
    near = np.float64((2 * scale + s) // (2 * s)) / np.float64(scale)
    most, least = float32(near), float32(1 / np.float64(s) - near)
    fours = np.empty(_BLOCK // 4, np.uint32)
    codes = fours.view(np.uint8)
    at = 0
    for bucket in range(len(norms)):
        first, stop = bucket * d, min(bucket * d + d, n)
        nu = norms[bucket]
        if nu == float32(0):
            if not add:
                out[first:stop] = float32(0)
            continue
        for start in range(first, stop, _BLOCK):
            size = min(_BLOCK, stop - start)
            target = out[start : start + size]
            for line in range(4 * start + _AHEAD, 4 * (start + size) + _AHEAD, 64):
                _prefetch_write(address + line)
            # level + 128 in a byte each: bytes to floats is what the compiler vectorises
            if bits == 4:
                twos = carray(_bytes_at(data + at // 2), (size + 1) // 2)
                for j in range(len(twos)):
                    high, low = uint32(twos[j] >> 4), uint32(twos[j] & 15)
                    codes[2 * j] = uint8(uint32(128) + high if high < uint32(8) else uint32(136) - high)
                    codes[2 * j + 1] = uint8(uint32(128) + low if low < uint32(8) else uint32(136) - low)
            else:
                ones = carray(_bytes_at(data + at), size)
                for i in range(size):
                    one = uint32(ones[i])
                    codes[i] = uint8(uint32(128) + one if one < uint32(128) else uint32(256) - one)
            if add:
                for i in range(size):
                    part = float32(codes[i]) - float32(128)
                    target[i] += nu * (part * most + part * least)
            else:
                for i in range(size):
                    part = float32(codes[i]) - float32(128)
                    target[i] = nu * (part * most + part * least)
            at += size


def quantise(x: Floats, d: int, s: int, l2: bool, key: int, chunk: int) -> tuple[Floats, Levels]:
    """See `qsgd_numpy.quantise`."""
    levels = np.empty(x.size, np.int16)
    norms, m = _run(x, d, s, l2, key, chunk, levels, np.empty(0, np.uint8), 0)
    return norms, levels[:m]


def quantise_fixed(x: Floats, d: int, s: int, l2: bool, key: int, chunk: int) -> tuple[Floats, Bytes, int]:
    """See `qsgd_numpy.quantise_fixed`."""
    bits = 1 + s.bit_length()
    if bits not in (4, 8) or (bits == 4 and d % 2):
        norms, levels = quantise(x, d, s, l2, key, chunk)
        return norms, *encode(Coding.FIXED, levels, d, s)
    packed = np.empty(x.size * bits // 8 + 1, np.uint8)
    norms, m = _run(x, d, s, l2, key, chunk, np.empty(0, np.int16), packed, bits)
    return norms, packed[: -(-m * bits // 8)], m * bits


def _run(
    x: Floats, d: int, s: int, l2: bool, key: int, chunk: int, levels: Levels, packed: Bytes, bits: int
) -> tuple[Floats, int]:
    x = _readable(x, _FLOAT)
    norms = np.empty(-(-x.size // d), np.float32)
    d = min(d, max(x.size, 1))
    m = _quantise(_address(x), x.size, d, s, l2, np.uint64(key), np.uint32(chunk), norms, levels, packed, bits)
    return norms, int(m)


def dequantise(levels: Levels, norms: Floats, d: int, s: int, out: Floats, add: bool) -> None:
    """See `qsgd_numpy.dequantise`."""
    _writable(out, _FLOAT, out.size)
    _dequantise(levels, norms, out.size, d, s, _address(out), add)


def decode_fixed(data: Bytes, norms: Floats, d: int, bits: int, out: Floats, add: bool) -> None:
    """See `qsgd_numpy.decode_fixed`."""
    _writable(out, _FLOAT, out.size)
    data = _readable(data, np.dtype(np.uint8))
    _decode_fixed(_address(data), norms, out.size, d, bits, _address(out), add)
