"""The kernels of `sparse_numpy` in numba: same names, same results. Rules are those of `kernels_numba`.

Selection: a threshold from a sample leaves slightly more than k candidates, one pass over a byte mask collects them,
and the exact cut is made among them. Where the sample was wrong (few distinct values, periodic data) a histogram of
exponents and leading bits gives a threshold that is right.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvstore.compression import sparse_numpy
from kvstore.compression.dense_numba import _words_at, sized, uint64
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
from kvstore.compression.philox_numba import fill_dither
from kvstore.compression.sparse_numpy import LONGEST_CODE, MAGNITUDE, Indices
from kvstore.errors import ArrayError

_FLOAT, _BYTE, _INDEX = np.dtype(np.float32), np.dtype(np.uint8), np.dtype(np.int64)
_indices_at = _pointer_to(_numba.types.int64)
_PIECE = 1024  # elements looked at, or strata drawn, at once, in scratch that stays in the L1 cache
_SAMPLED = 64, 400  # one of so many elements is looked at for the first threshold: of a chunk, of a large array
_LARGE = 1 << 22
_SMALL = 8192  # elements below which all are candidates
_BINS, _BIN_SHIFT = 2048, 20
_AHEAD = 1024  # bytes in front of the loop at which memory is asked for


@_jit
def _collect(x, n, least, room, indices, sizes):  # type: ignore[no-untyped-def]
    """Indices and magnitude bits of the elements of at least `least`; their number, -1 if it exceeds `room`."""
    bits = carray(_words_at(x), n)
    where, kept = carray(_indices_at(indices), room + _PIECE), carray(_words_at(sizes), room + _PIECE)
    mask = np.zeros(_PIECE, np.uint8)
    hits = np.empty(_PIECE // 8, np.int32)
    words, count = mask.view(np.uint64), 0
    for base in range(0, n, _PIECE):
        for line in range(4 * base + _AHEAD, 4 * (base + _PIECE) + _AHEAD, 64):
            _prefetch_read(x + line)
        own = bits[base : min(n, base + _PIECE)]
        if len(own) < _PIECE:
            mask[:] = 0
        for i in range(len(own)):
            mask[i] = uint8(uint32(own[i] & MAGNITUDE) >= least)
        hit = 0
        for j in range((len(own) + 7) // 8):  # without a branch: words of eight in which there is one
            hits[hit] = j
            hit += words[j] != 0
        for h in range(hit):
            for i in range(8 * hits[h], min(8 * hits[h] + 8, len(own))):
                where[count] = base + i
                kept[count] = uint32(own[i] & MAGNITUDE)
                count += mask[i]
        if count > room:
            return -1
    return count


@_jit
def _histogram(x, n, counts):  # type: ignore[no-untyped-def]
    bits, bins = carray(_words_at(x), n), carray(_indices_at(counts), _BINS)
    for i in range(n):
        bins[uint32(bits[i] & MAGNITUDE) >> uint32(_BIN_SHIFT)] += 1


@_jit
def _pack_gaps(indices, count, out):  # type: ignore[no-untyped-def]
    where, data = carray(_indices_at(indices), count), carray(_bytes_at(out), LONGEST_CODE * count)
    size = 0
    for i in range(count):
        gap = where[i] - (where[i - 1] + 1 if i else 0)
        while gap > 127:
            data[size] = uint8(gap & 127 | 128)
            gap >>= 7
            size += 1
        data[size] = uint8(gap)
        size += 1
    return size


@_jit
def _unpack_gaps(data, size, count, n, out):  # type: ignore[no-untyped-def]
    """Whether the bytes are those of `count` indices below n."""
    code, where = carray(_bytes_at(data), size), carray(_indices_at(out), count)
    last, gap, place, found = np.int64(-1), np.int64(0), 0, 0
    for i in range(size):
        byte = np.int64(code[i])
        gap |= (byte & 127) << (7 * place)
        place += 1
        if byte > 127:
            if place == LONGEST_CODE:
                return False
            continue
        last += gap + 1
        if found == count or last >= n:
            return False
        where[found] = last
        found += 1
        gap, place = np.int64(0), 0
    return found == count and place == 0


@_jit
def _scatter_add(values, indices, count, n, out):  # type: ignore[no-untyped-def]
    own, where, target = carray(_floats_at(values), count), carray(_indices_at(indices), count), carray(_floats_at(out), n)  # noqa: E501  # fmt: skip
    for i in range(count):
        target[where[i]] += own[i]


@_jit
def _draw(n, k, low, high, chunk, base, random, where):  # type: ignore[no-untyped-def]
    """The indices of at most _PIECE strata from stratum `base` on, a multiple of 4."""
    short, longer = n // k, n % k
    m = min(_PIECE, k - base)
    fill_dither(random, low, high, chunk, base // 4, (m + 3) // 4)
    for i in range(m):
        j = base + i
        length = uint64(short + (1 if j < longer else 0))
        where[i] = j * short + min(j, longer) + np.int64(uint64(uint64(random[i]) * length) >> uint64(32))
    return m


@_jit
def _gather_strata(x, n, k, low, high, chunk, multiply, values):  # type: ignore[no-untyped-def]
    source, out = carray(_floats_at(x), n), carray(_floats_at(values), k)
    random, where = np.empty(_PIECE, np.uint32), np.empty(_PIECE, np.int64)
    for base in range(0, k, _PIECE):
        m = _draw(n, k, low, high, chunk, base, random, where)
        for i in range(m):
            out[base + i] = source[where[i]]
        if multiply:
            for i in range(m):
                out[base + i] *= float32(n // k + (1 if base + i < n % k else 0))


@_jit
def _scatter_strata_add(values, n, k, low, high, chunk, out):  # type: ignore[no-untyped-def]
    own, target = carray(_floats_at(values), k), carray(_floats_at(out), n)
    random, where = np.empty(_PIECE, np.uint32), np.empty(_PIECE, np.int64)
    for base in range(0, k, _PIECE):
        m = _draw(n, k, low, high, chunk, base, random, where)
        for i in range(m):
            _prefetch_write(out + 4 * where[i])
        for i in range(m):
            target[where[i]] += own[base + i]


def select_largest(x: Floats, k: int) -> Indices:
    """See `sparse_numpy.select_largest`."""
    x = _readable(x, _FLOAT)
    n = x.size
    if not 0 < k < n or n < _SMALL:
        return sparse_numpy.select_largest(x, k)
    found = _candidates(x, _sampled_threshold(x, k), k, 3 * k + _SMALL)
    if found is None:
        found = _candidates(x, _exact_threshold(x, k), 0, n)
    assert found is not None
    indices, sizes = found
    surplus = sizes.size - k
    if surplus <= 0:
        return indices
    least = np.partition(sizes, surplus)[surplus]
    keep = sizes > least
    ties = np.flatnonzero(sizes == least)
    keep[ties[: k - int(keep.sum())]] = True
    kept: Indices = indices[keep]
    return kept


def _candidates(x: Floats, least: int, needed: int, room: int) -> tuple[Indices, NDArray[np.uint32]] | None:
    """Indices and magnitudes of the elements that are not zero and of at least `least`; None if fewer than needed."""
    indices, sizes = np.empty(room + _PIECE, np.int64), np.empty(room + _PIECE, np.uint32)
    count = _collect(_address(x), x.size, np.uint32(max(least, 1)), room, _address(indices), _address(sizes))
    if count < needed:
        return None
    return indices[:count], sizes[:count]


def _sampled_threshold(x: Floats, k: int) -> int:
    """Magnitude bits that probably leave somewhat more than k elements."""
    sample = x.view(np.uint32)[:: _SAMPLED[x.size >= _LARGE]] & MAGNITUDE
    expected = k * sample.size / x.size
    rank = min(int(expected + 4 * math.sqrt(expected)) + 4, sample.size)
    return int(np.partition(sample, sample.size - rank)[sample.size - rank])


def _exact_threshold(x: Floats, k: int) -> int:
    """Magnitude bits that leave at least k elements, and no fewer than needed within one bin."""
    counts = np.zeros(_BINS, np.int64)
    _histogram(_address(x), x.size, _address(counts))
    enough = np.flatnonzero(np.cumsum(counts[::-1]) >= k)
    return int(_BINS - 1 - enough[0]) << _BIN_SHIFT


def pack_gaps(indices: Indices) -> Bytes:
    """See `sparse_numpy.pack_gaps`."""
    indices = _readable(indices, _INDEX)
    out = np.empty(LONGEST_CODE * indices.size, np.uint8)
    size: int = _pack_gaps(_address(indices), indices.size, _address(out))
    return out[:size]


def unpack_gaps(data: Bytes, count: int, n: int) -> Indices | None:
    """See `sparse_numpy.unpack_gaps`."""
    data, out = _readable(data, _BYTE), np.empty(count, np.int64)
    return out if _unpack_gaps(_address(data), data.size, count, n, _address(out)) else None


def scatter_add(values: Floats, indices: Indices, out: Floats) -> None:
    """See `sparse_numpy.scatter_add`."""
    _writable(out, _FLOAT, out.size)
    values, indices = sized(values, _FLOAT, indices.size), _readable(indices, _INDEX)
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < out.size:
        raise ArrayError(f"indices {indices.min()}..{indices.max()} of {out.size} elements")
    _scatter_add(_address(values), _address(indices), indices.size, out.size, _address(out))


def gather_strata(x: Floats, key: int, chunk: int, multiply: bool, values: Floats) -> None:
    """See `sparse_numpy.gather_strata`."""
    x = _readable(x, _FLOAT)
    _few(values.size, x.size)
    _writable(values, _FLOAT, values.size)
    _gather_strata(_address(x), x.size, values.size, *_stream(key, chunk), multiply, _address(values))


def scatter_strata_add(values: Floats, key: int, chunk: int, out: Floats) -> None:
    """See `sparse_numpy.scatter_strata_add`."""
    values = _readable(values, _FLOAT)
    _few(values.size, out.size)
    _writable(out, _FLOAT, out.size)
    _scatter_strata_add(_address(values), out.size, values.size, *_stream(key, chunk), _address(out))


def _few(k: int, n: int) -> None:
    if k > n:
        raise ArrayError(f"{k} strata of {n} elements")


def _stream(key: int, chunk: int) -> tuple[np.uint32, np.uint32, np.uint32]:
    return np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32), np.uint32(chunk)
