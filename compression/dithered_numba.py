"""The kernels of `dithered_numpy` in numba: same names, same bits. Shape and rules are those of `kernels_numba`."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.dense_numba import _LANES, _fold, _signed_at, _words_at, sized, uint64
from kvstore.compression.dense_numpy import blocks_of
from kvstore.compression.kernels_numba import (
    _address,
    _bytes_at,
    _floats_at,
    _jit,
    _readable,
    _spread,
    _writable,
    carray,
    float32,
    uint8,
    uint32,
)
from kvstore.compression.kernels_numpy import Bytes, Floats, packed_size
from kvstore.compression.philox_numba import fill_dither

_FLOAT, _BYTE = np.dtype(np.float32), np.dtype(np.uint8)
_PIECE = 512  # elements worked on at once, in scratch that stays in the L1 cache


@_jit
def _encode_natural(x, n, low, high, chunk, exponents, signs):  # type: ignore[no-untyped-def]
    bits, out = carray(_words_at(x), n), carray(_bytes_at(exponents), n)
    packed = carray(_bytes_at(signs), (n + 7) // 8)
    random, codes = np.empty(_PIECE // 2, np.uint32), np.zeros(_PIECE, np.uint8)
    numbers, words = random.view(np.uint16), codes.view(np.uint64)
    for base in range(0, n, _PIECE):
        m = min(_PIECE, n - base)
        fill_dither(random, low, high, chunk, base // 8, (m + 7) // 8)
        own, target = bits[base : base + m], out[base : base + m]
        if m < _PIECE:
            codes[:] = 0
        for i in range(m):
            exponent = uint32(uint32(own[i] >> uint32(23)) & uint32(255))
            fraction = uint32(own[i] & uint32(0x7FFFFF))
            up = uint32(uint32(numbers[i]) << uint32(7)) < fraction
            target[i] = uint8(exponent + uint32(up & (exponent > 0) & (exponent < 254)))
            codes[i] = uint8(own[i] >> uint32(31))
        line = packed[base // 8 : base // 8 + (m + 7) // 8]
        for j in range(len(line)):
            line[j] = uint8(uint64(words[j] * uint64(0x8040201008040201)) >> uint64(56))


@_jit
def _decode_natural_add(exponents, signs, n, scale, out):  # type: ignore[no-untyped-def]
    target, own, packed = carray(_floats_at(out), n), carray(_bytes_at(exponents), n), carray(_bytes_at(signs), (n + 7) // 8)  # noqa: E501  # fmt: skip
    codes, values = np.empty(_PIECE, np.uint8), np.empty(_PIECE, np.float32)
    words, bits, s = codes.view(np.uint64), values.view(np.uint32), float32(scale)
    for base in range(0, n, _PIECE):
        m = min(_PIECE, n - base)
        line, piece, sums = packed[base // 8 : base // 8 + (m + 7) // 8], own[base : base + m], target[base : base + m]
        for j in range(len(line)):
            words[j] = uint64(uint64(uint64(line[j]) * uint64(0x0101010101010101)) & uint64(0x0102040810204080))
        for i in range(m):
            bits[i] = uint32(uint32(uint32(piece[i]) << uint32(23)) | uint32(uint32(codes[i] != 0) << uint32(31)))
        for i in range(m):
            sums[i] += values[i] * s


@_jit
def _ternary_scales(x, n, bucket, clip, scales):  # type: ignore[no-untyped-def]
    values, out = carray(_floats_at(x), n), carray(_floats_at(scales), (n + bucket - 1) // bucket)
    lanes = np.empty(_LANES, np.float64)
    for b in range(len(out)):
        piece = values[b * bucket : min(n, (b + 1) * bucket)]
        m, most = len(piece), float32(0)
        whole = m // _LANES * _LANES
        for i in range(m):
            v = abs(piece[i])
            most = v if v > most else most
        out[b] = most
        if clip > 0:
            lanes[:] = 0
            for base in range(0, whole, _LANES):
                for i in range(_LANES):
                    v = np.float64(piece[base + i])
                    lanes[i] += v * v
            for i in range(whole, m):
                v = np.float64(piece[i])
                lanes[i - whole] += v * v
            limit = math.sqrt(_fold(lanes) / np.float64(m)) * clip
            if limit < most:
                out[b] = float32(limit)


@_jit
def _encode_ternary(x, n, scales, bucket, low, high, chunk, out):  # type: ignore[no-untyped-def]
    values, s = carray(_floats_at(x), n), carray(_floats_at(scales), (n + bucket - 1) // bucket)
    packed = carray(_bytes_at(out), (n + 15) // 16 * 4)
    random, codes = np.empty(_PIECE // 2, np.uint32), np.zeros(_PIECE, np.uint8)
    numbers, words = random.view(np.uint16), codes.view(np.uint32)
    packed[n // 4 :] = 0
    for b in range(len(s)):
        stop, scale = min(n, (b + 1) * bucket), s[b]
        for base in range(b * bucket, stop, _PIECE):
            m = min(_PIECE, stop - base)
            fill_dither(random, low, high, chunk, base // 8, (m + 7) // 8)
            piece = values[base : base + m]
            if m < _PIECE or scale == 0:
                codes[:] = 0
            if scale > 0:
                for i in range(m):
                    share = abs(piece[i]) / scale * float32(65536)
                    sent = uint8(float32(numbers[i]) < share)
                    codes[i] = uint8(uint8(sent << uint8(1)) | uint8(sent & uint8(piece[i] >= 0)))
            line = packed[base // 4 : base // 4 + (m + 3) // 4]
            for j in range(len(line)):
                line[j] = uint8(uint32(words[j] * uint32(0x40100401)) >> uint32(24))


@_jit
def _decode_ternary_add(data, n, scales, bucket, out):  # type: ignore[no-untyped-def]
    target, s = carray(_floats_at(out), n), carray(_floats_at(scales), (n + bucket - 1) // bucket)
    packed = carray(_bytes_at(data), (n + 15) // 16 * 4)
    words = np.empty(_PIECE // 4, np.uint32)
    counts = words.view(np.uint8)
    for b in range(len(s)):
        stop, scale = min(n, (b + 1) * bucket), s[b]
        for base in range(b * bucket, stop, _PIECE):
            m = min(_PIECE, stop - base)
            line, own = packed[base // 4 : base // 4 + (m + 3) // 4], target[base : base + m]
            for j in range(len(line)):
                words[j] = _spread(line[j])
            for i in range(m):
                own[i] += (float32(counts[i]) - float32(1)) * scale


@_jit
def _round_ints(x, n, scales, block, low, high, chunk, out):  # type: ignore[no-untyped-def]
    values, codes = carray(_floats_at(x), n), carray(_signed_at(out), n)
    s = carray(_floats_at(scales), (n + block - 1) // block)
    random = np.empty(_PIECE // 2, np.uint32)
    numbers = random.view(np.uint16)
    for b in range(len(s)):
        stop, scale = min(n, (b + 1) * block), s[b]
        for base in range(b * block, stop, _PIECE):
            m = min(_PIECE, stop - base)
            piece, target = values[base : base + m], codes[base : base + m]
            if scale == 0:
                target[:] = 0
                continue
            fill_dither(random, low, high, chunk, base // 8, (m + 7) // 8)
            for i in range(m):
                size = abs(piece[i]) / scale
                below = np.int32(size)
                up = float32(numbers[i]) < (size - float32(below)) * float32(65536)
                code = min(np.int32(below + np.int32(up)), np.int32(127))
                target[i] = -code if piece[i] < 0 else code


def encode_natural(x: Floats, key: int, chunk: int, exponents: Bytes, signs: Bytes) -> None:
    """See `dithered_numpy.encode_natural`."""
    x = _readable(x, _FLOAT)
    _writable(exponents, _BYTE, x.size)
    _writable(signs, _BYTE, blocks_of(x.size, 8))
    _encode_natural(_address(x), x.size, *_stream(key, chunk), _address(exponents), _address(signs))


def decode_natural_add(exponents: Bytes, signs: Bytes, scale: float, out: Floats) -> None:
    """See `dithered_numpy.decode_natural_add`."""
    n = out.size
    _writable(out, _FLOAT, n)
    exponents, signs = sized(exponents, _BYTE, n), sized(signs, _BYTE, blocks_of(n, 8))
    _decode_natural_add(_address(exponents), _address(signs), n, float(scale), _address(out))


def ternary_scales(x: Floats, bucket: int, clip: float, scales: Floats) -> None:
    """See `dithered_numpy.ternary_scales`."""
    x = _readable(x, _FLOAT)
    _writable(scales, _FLOAT, blocks_of(x.size, bucket))
    _ternary_scales(_address(x), x.size, bucket, float(clip), _address(scales))


def encode_ternary(x: Floats, scales: Floats, bucket: int, key: int, chunk: int, out: Bytes) -> None:
    """See `dithered_numpy.encode_ternary`."""
    x = _readable(x, _FLOAT)
    n, scales = x.size, sized(scales, _FLOAT, blocks_of(x.size, bucket))
    _writable(out, _BYTE, packed_size(n))
    _encode_ternary(_address(x), n, _address(scales), bucket, *_stream(key, chunk), _address(out))


def decode_ternary_add(data: Bytes, scales: Floats, bucket: int, out: Floats) -> None:
    """See `dithered_numpy.decode_ternary_add`."""
    n = out.size
    _writable(out, _FLOAT, n)
    data, scales = sized(data, _BYTE, packed_size(n)), sized(scales, _FLOAT, blocks_of(n, bucket))
    _decode_ternary_add(_address(data), n, _address(scales), bucket, _address(out))


def round_ints(x: Floats, scales: Floats, block: int, key: int, chunk: int, codes: NDArray[np.int8]) -> None:
    """See `dithered_numpy.round_ints`."""
    x, scales = _readable(x, _FLOAT), sized(scales, _FLOAT, blocks_of(x.size, block))
    _writable(codes, np.dtype(np.int8), x.size)
    _round_ints(_address(x), x.size, _address(scales), block, *_stream(key, chunk), _address(codes))


def _stream(key: int, chunk: int) -> tuple[np.uint32, np.uint32, np.uint32]:
    """What one compiled type of argument takes: the halves of the key, and the chunk."""
    return np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32), np.uint32(chunk)
