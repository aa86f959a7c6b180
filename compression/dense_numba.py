"""The kernels of `dense_numpy` in numba: same names, same bits. Shape and rules are those of `kernels_numba`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.dense_numpy import LARGEST, SHRINK, SMALLEST, Format, blocks_of
from kvstore.compression.kernels_numba import (
    _address,
    _bytes_at,
    _floats_at,
    _jit,
    _numba,
    _pointer_to,
    _prefetch_read,
    _prefetch_write,
    _readable,
    _writable,
    carray,
    float32,
    uint8,
    uint32,
)
from kvstore.compression.kernels_numpy import Bytes, Floats
from kvstore.errors import ArrayError

uint64 = _numba.uint64
_halves_at, _signed_at, _words_at = (
    _pointer_to(kind) for kind in (_numba.types.uint16, _numba.types.int8, _numba.types.uint32)
)
_FLOAT, _BYTE = np.dtype(np.float32), np.dtype(np.uint8)
_PIECE = 512  # elements worked on at once, in scratch that stays in the L1 cache
_LANES = 64
_AHEAD = 1024
_SHRINK, _GROW = np.float32(SHRINK), np.float32(1 / SHRINK)


@_jit
def _block_scales(x, n, block, top, scales):  # type: ignore[no-untyped-def]
    words, out = carray(_words_at(x), n), carray(_floats_at(scales), (n + block - 1) // block)
    scratch = np.empty(1, np.float32)
    bits, t = scratch.view(np.uint32), float32(top)
    for b in range(len(out)):
        piece = words[b * block : min(n, (b + 1) * block)]
        most = uint32(0)
        for i in range(len(piece)):
            most = max(most, uint32(piece[i] & uint32(0x7FFFFFFF)))
        bits[0] = most
        scratch[0] = scratch[0] / t
        if scratch[0] * t > LARGEST:
            bits[0] = uint32(bits[0] - uint32(1))
        out[b] = scratch[0] if scratch[0] >= SMALLEST else float32(0)


@_jit
def _round_floats(values, scale, kind, f, g, codes):  # type: ignore[no-untyped-def]
    """At most _PIECE elements; f and g are scratch."""
    nbytes, mantissa, bias, top = kind
    w, v, m = f.view(np.uint32), g.view(np.uint32), len(values)
    drop = uint32(23 - mantissa)
    half, rebias = uint32((1 << (22 - mantissa)) - 1), uint32((127 - bias) << mantissa)
    magic_bits, least = uint32((151 - bias - mantissa) << 23), uint32((128 - bias) << 23)
    most, sign = uint32(top), uint32(32 - 8 * nbytes)
    v[0] = magic_bits
    magic = g[0]
    for i in range(m):
        f[i] = values[i] / scale
    for i in range(m):
        g[i] = abs(f[i]) + magic
    for i in range(m):
        magnitude = uint32(w[i] & uint32(0x7FFFFFFF))
        odd = uint32(uint32(magnitude >> drop) & uint32(1))
        normal = uint32(uint32(uint32(magnitude + uint32(half + odd)) >> drop) - rebias)
        normal = min(normal, most)
        small = uint32(v[i] - magic_bits)
        code = small if magnitude < least else normal
        w[i] = uint32(code | uint32(uint32(w[i] & uint32(0x80000000)) >> sign))
    for i in range(m):
        codes[i] = w[i]


@_jit
def _encode_floats(x, n, scales, block, kind, out):  # type: ignore[no-untyped-def]
    values, s = carray(_floats_at(x), n), carray(_floats_at(scales), (n + block - 1) // block)
    f, g = np.empty(_PIECE, np.float32), np.empty(_PIECE, np.float32)
    wide = kind[0] == 2
    halves, narrow = carray(_halves_at(out), n if wide else 0), carray(_bytes_at(out), 0 if wide else n)
    for b in range(len(s)):
        stop = min(n, (b + 1) * block)
        for base in range(b * block, stop, _PIECE):
            end = min(stop, base + _PIECE)
            for line in range(4 * base + _AHEAD, 4 * end + _AHEAD, 64):
                _prefetch_read(x + line)
            if s[b] == 0:
                if wide:
                    halves[base:end] = 0
                else:
                    narrow[base:end] = 0
            elif wide:
                _round_floats(values[base:end], s[b], kind, f, g, halves[base:end])
            else:
                _round_floats(values[base:end], s[b], kind, f, g, narrow[base:end])


@_jit
def _widen(codes, scale, kind, f, target):  # type: ignore[no-untyped-def]
    nbytes, mantissa, bias, _ = kind
    w, shift, sign = f.view(np.uint32), uint32(23 - mantissa), uint32(32 - 8 * nbytes)
    magnitude, top = uint32((1 << (8 * nbytes - 1)) - 1), uint32(1 << (8 * nbytes - 1))
    w[0] = uint32((254 - bias) << 23)
    factor = f[0]
    for i in range(len(codes)):
        code = uint32(codes[i])
        w[i] = uint32(uint32(uint32(code & magnitude) << shift) | uint32(uint32(code & top) << sign))
    for i in range(len(codes)):
        target[i] += (f[i] * factor) * scale


@_jit
def _decode_floats_add(data, n, scales, block, kind, out):  # type: ignore[no-untyped-def]
    target, s = carray(_floats_at(out), n), carray(_floats_at(scales), (n + block - 1) // block)
    f = np.empty(_PIECE, np.float32)
    wide = kind[0] == 2
    halves, narrow = carray(_halves_at(data), n if wide else 0), carray(_bytes_at(data), 0 if wide else n)
    for b in range(len(s)):
        stop = min(n, (b + 1) * block)
        for base in range(b * block, stop, _PIECE):
            end = min(stop, base + _PIECE)
            if wide:
                _widen(halves[base:end], s[b], kind, f, target[base:end])
            else:
                _widen(narrow[base:end], s[b], kind, f, target[base:end])


@_jit
def _encode_ints(x, n, scales, block, out):  # type: ignore[no-untyped-def]
    values, codes = carray(_floats_at(x), n), carray(_signed_at(out), n)
    s = carray(_floats_at(scales), (n + block - 1) // block)
    magic = float32(12582912)  # 1.5 * 2^23: adding it rounds to an integer, ties to even
    f = np.empty(_PIECE, np.float32)
    for b in range(len(s)):
        stop, scale = min(n, (b + 1) * block), s[b]
        for base in range(b * block, stop, _PIECE):
            end = min(stop, base + _PIECE)
            piece, target = values[base:end], codes[base:end]
            if scale == 0:
                target[:] = 0
                continue
            for i in range(len(piece)):
                v = (piece[i] / scale + magic) - magic
                f[i] = min(max(v, float32(-127)), float32(127))
            for i in range(len(piece)):
                target[i] = np.int32(f[i])


@_jit
def _decode_ints_add(data, n, scales, block, out):  # type: ignore[no-untyped-def]
    target, codes = carray(_floats_at(out), n), carray(_signed_at(data), n)
    s = carray(_floats_at(scales), (n + block - 1) // block)
    for b in range(len(s)):
        start, stop, scale = b * block, min(n, (b + 1) * block), s[b]
        piece, own = target[start:stop], codes[start:stop]
        for i in range(len(piece)):
            piece[i] += float32(own[i]) * scale


@_jit
def _fold(lanes):  # type: ignore[no-untyped-def]
    half = _LANES // 2
    while half:
        for i in range(half):
            lanes[i] = lanes[i] + lanes[i + half]
        half //= 2
    return lanes[0]


@_jit
def _mean(total, count):  # type: ignore[no-untyped-def]
    return min(total / float32(max(count, 1)) * _GROW, LARGEST)


@_jit
def _encode_signs(x, residual, n, bucket, means, scales, out):  # type: ignore[no-untyped-def]
    g, r = carray(_floats_at(x), n), carray(_floats_at(residual), n)
    buckets = (n + bucket - 1) // bucket
    s, packed = carray(_floats_at(scales), buckets * means), carray(_bytes_at(out), (n + 7) // 8)
    codes = np.zeros((min(bucket, n) + 63) // 64 * 64, np.uint8)
    words = codes.view(np.uint64)
    up, down = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    for b in range(buckets):
        start, stop = b * bucket, min(n, (b + 1) * bucket)
        m = stop - start
        whole = m // _LANES * _LANES
        gs, rs = g[start:stop], r[start:stop]
        up[:], down[:] = 0, 0
        if m < len(codes):
            codes[:] = 0
        for base in range(0, whole, _LANES):
            gl, rl, cl = gs[base : base + _LANES], rs[base : base + _LANES], codes[base : base + _LANES]
            for line in range(4 * (start + base) + 2048, 4 * (start + base + _LANES) + 2048, 64):
                _prefetch_read(x + line)
                _prefetch_write(residual + line)
            for i in range(_LANES):
                v = rl[i] + gl[i]
                rl[i] = v
                cl[i] = uint8(v >= 0)
            for i in range(_LANES):
                small = rl[i] * _SHRINK
                up[i] += small if small >= 0 else float32(0)
                down[i] += float32(0) if small >= 0 else -small
        for i in range(whole, m):
            v = rs[i] + gs[i]
            rs[i] = v
            small = v * _SHRINK
            up[i - whole] += small if small >= 0 else float32(0)
            down[i - whole] += float32(0) if small >= 0 else -small
            codes[i] = uint8(v >= 0)
        count, line = uint64(0), packed[start // 8 : start // 8 + (m + 7) // 8]
        for base in range(0, len(line), 128):
            part, own, sums = line[base : base + 128], words[base : base + 128], uint64(0)
            for j in range(len(part)):
                z = own[j]
                sums = uint64(sums + z)  # each byte counts to 128 at most
                part[j] = uint8(uint64(z * uint64(0x8040201008040201)) >> uint64(56))
            even = uint64(0x00FF00FF00FF00FF)
            pairs = uint64(uint64(sums & even) + uint64(uint64(sums >> uint64(8)) & even))
            count += uint64(uint64(pairs * uint64(0x0001000100010001)) >> uint64(48))
        if means == 2:
            first, last = _mean(_fold(up), np.int64(count)), _mean(_fold(down), m - np.int64(count))
            s[2 * b], s[2 * b + 1] = first, last
        else:
            first = _mean(_fold(up) + _fold(down), m)
            last = first
            s[b] = first
        for i in range(m):
            v = rs[i]
            rs[i] = v - (first if v >= 0 else -last)


@_jit
def _decode_signs_add(data, n, scales, bucket, means, out):  # type: ignore[no-untyped-def]
    target, packed = carray(_floats_at(out), n), carray(_bytes_at(data), (n + 7) // 8)
    s = carray(_floats_at(scales), (n + bucket - 1) // bucket * means)
    codes = np.empty(_PIECE, np.uint8)
    words = codes.view(np.uint64)
    for b in range(len(s) // means):
        stop = min(n, (b + 1) * bucket)
        first, last = s[means * b], -s[means * b + means - 1]
        for base in range(b * bucket, stop, _PIECE):
            end = min(stop, base + _PIECE)
            own, line = target[base:end], packed[base // 8 : (end + 7) // 8]
            for ahead in range(4 * base + _AHEAD, 4 * end + _AHEAD, 64):
                _prefetch_write(out + ahead)
            for j in range(len(line)):
                # each of the eight bytes keeps its own bit of the byte, the first the top one
                z = uint64(uint64(line[j]) * uint64(0x0101010101010101))
                words[j] = uint64(z & uint64(0x0102040810204080))
            for i in range(len(own)):
                own[i] += first if codes[i] != 0 else last


def block_scales(x: Floats, block: int, top: float, scales: Floats) -> None:
    """See `dense_numpy.block_scales`."""
    x = _readable(x, _FLOAT)
    _writable(scales, _FLOAT, blocks_of(x.size, block))
    _block_scales(_address(x), x.size, block, float(top), _address(scales))


def encode_floats(x: Floats, scales: Floats, block: int, kind: Format, codes: NDArray[Any]) -> None:
    """See `dense_numpy.encode_floats`."""
    x, scales = _readable(x, _FLOAT), sized(scales, _FLOAT, blocks_of(x.size, block))
    _writable(codes, kind.dtype, x.size)
    _encode_floats(_address(x), x.size, _address(scales), block, tuple(kind), _address(codes))


def decode_floats_add(codes: NDArray[Any], scales: Floats, block: int, kind: Format, out: Floats) -> None:
    """See `dense_numpy.decode_floats_add`."""
    n = out.size
    _writable(out, _FLOAT, n)
    codes, scales = sized(codes, kind.dtype, n), sized(scales, _FLOAT, blocks_of(n, block))
    _decode_floats_add(_address(codes), n, _address(scales), block, tuple(kind), _address(out))


def encode_ints(x: Floats, scales: Floats, block: int, codes: NDArray[np.int8]) -> None:
    """See `dense_numpy.encode_ints`."""
    x, scales = _readable(x, _FLOAT), sized(scales, _FLOAT, blocks_of(x.size, block))
    _writable(codes, np.dtype(np.int8), x.size)
    _encode_ints(_address(x), x.size, _address(scales), block, _address(codes))


def decode_ints_add(codes: NDArray[np.int8], scales: Floats, block: int, out: Floats) -> None:
    """See `dense_numpy.decode_ints_add`."""
    n = out.size
    _writable(out, _FLOAT, n)
    codes, scales = sized(codes, np.dtype(np.int8), n), sized(scales, _FLOAT, blocks_of(n, block))
    _decode_ints_add(_address(codes), n, _address(scales), block, _address(out))


def encode_signs(x: Floats, residual: Floats, bucket: int, means: int, scales: Floats, bits: Bytes) -> None:
    """See `dense_numpy.encode_signs`."""
    x = _readable(x, _FLOAT)
    n = x.size
    _writable(residual, _FLOAT, n)
    _writable(scales, _FLOAT, blocks_of(n, bucket) * means)
    _writable(bits, _BYTE, blocks_of(n, 8))
    _encode_signs(_address(x), _address(residual), n, bucket, means, _address(scales), _address(bits))


def decode_signs_add(bits: Bytes, scales: Floats, bucket: int, means: int, out: Floats) -> None:
    """See `dense_numpy.decode_signs_add`."""
    n = out.size
    _writable(out, _FLOAT, n)
    bits, scales = sized(bits, _BYTE, blocks_of(n, 8)), sized(scales, _FLOAT, blocks_of(n, bucket) * means)
    _decode_signs_add(_address(bits), n, _address(scales), bucket, means, _address(out))


def sized(array: NDArray[Any], dtype: np.dtype[Any], size: int) -> NDArray[Any]:
    """`array`, or an aligned contiguous copy, of exactly `size` elements."""
    array = _readable(array, dtype)
    if array.size != size:
        raise ArrayError(f"a kernel was given {array.size} elements of {dtype}: {size} are needed")
    return array
