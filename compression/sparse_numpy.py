"""The plain NumPy reference of the kernels that touch few elements: the largest ones, and one of every stratum.

The twins `sparse_numba` and `sparse_cupy` give the same. Indices are int64, ascending, without repetition.

Gaps: the number of elements between an index and the one before it (before the first: from element 0), seven bits to
a byte, lowest first, the top bit set in all bytes but the last of each number.

Strata: element indices 0 .. n - 1 are cut into k runs, the first n mod k of them one longer than the others. Of run j
the element (word j of the Philox stream) * length >> 32 is taken: each element with probability 1 / length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.kernels_numpy import Bytes, Floats
from kvstore.compression.philox import words

Indices = NDArray[np.int64]
MAGNITUDE = np.uint32(0x7FFFFFFF)
LONGEST_CODE = 5
"""Bytes of one gap: 35 bits, for up to 2^31 elements."""


def select_largest(x: Floats, k: int) -> Indices:
    """The indices of the k elements of largest magnitude; of equal ones the lowest indices. Zeros are never taken.

    Written so that it also runs over CuPy arrays.
    """
    size = x.view(np.uint32) & MAGNITUDE
    k = min(k, int((size > 0).sum()))
    if k == 0:
        return np.zeros_like(x, np.int64, shape=(0,))
    least = np.partition(size, x.size - k)[x.size - k]
    above, equal = np.flatnonzero(size > least), np.flatnonzero(size == least)
    return np.sort(np.concatenate([above, equal[: k - above.size]]))


def pack_gaps(indices: Indices) -> Bytes:
    """The bytes of the gaps; see above."""
    gaps = np.diff(indices, prepend=-1) - 1
    length = np.ones(gaps.size, np.int64)
    for more in range(1, LONGEST_CODE):
        length += gaps >= 1 << 7 * more
    stop = np.cumsum(length)
    out = np.zeros(int(stop[-1]) if stop.size else 0, np.uint8)
    for place in range(LONGEST_CODE):
        has = length > place
        part = (gaps[has] >> 7 * place) & 127
        out[(stop - length)[has] + place] = part | np.where(length[has] > place + 1, 128, 0)
    return out


def unpack_gaps(data: Bytes, count: int, n: int) -> Indices | None:
    """The `count` indices, all below n; None where the bytes do not say exactly that."""
    last = data < 128
    stops = np.flatnonzero(last) + 1
    if stops.size != count or (data.size and not last[-1]):
        return None
    if count == 0:
        return np.zeros(0, np.int64)
    starts = np.concatenate([[0], stops[:-1]])
    if int((stops - starts).max()) > LONGEST_CODE:
        return None
    place = np.arange(data.size) - np.repeat(starts, stops - starts)
    gaps = np.add.reduceat((data & np.uint8(127)).astype(np.int64) << 7 * place, starts)
    if int(gaps.max()) >= n:
        return None
    indices: Indices = np.cumsum(gaps + 1) - 1
    return indices if int(indices[-1]) < n else None


def scatter_add(values: Floats, indices: Indices, out: Floats) -> None:
    """out[indices] += values."""
    with np.errstate(over="ignore", invalid="ignore"):
        out[indices] += values


def strata(n: int, k: int, key: int, chunk: int) -> tuple[Indices, NDArray[Any]]:
    """The index taken from each of the k strata of n elements, and the length of each stratum."""
    short, longer = divmod(n, k) if k else (0, 0)
    j = np.arange(k, dtype=np.int64)
    length = short + (j < longer)
    offset = words(key, chunk, k).astype(np.uint64) * length.astype(np.uint64) >> np.uint64(32)
    return j * short + np.minimum(j, longer) + offset.astype(np.int64), length


def gather_strata(x: Floats, key: int, chunk: int, multiply: bool, values: Floats) -> None:
    """values = the element of each stratum, times the stratum's length if `multiply`."""
    indices, length = strata(x.size, values.size, key, chunk)
    values[:] = x[indices]
    if multiply:
        with np.errstate(over="ignore"):
            values *= length.astype(np.float32)


def scatter_strata_add(values: Floats, key: int, chunk: int, out: Floats) -> None:
    """out += each value at the element of its stratum."""
    scatter_add(values, strata(out.size, values.size, key, chunk)[0], out)
