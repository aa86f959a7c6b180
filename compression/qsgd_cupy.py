"""The QSGD operator on a CUDA device: same names and bits as `qsgd_numpy`.

Norms and levels are computed on the device; levels are coded and decoded on the host (see `codings_numpy`), two bytes
per element crossing the bus. Needs a device to run: the tests run the text of `cuda/qsgd.cu` on the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.codec import Array
from kvstore.compression.codings import Coding, Levels
from kvstore.compression.kernels import family_for
from kvstore.compression.kernels_cupy import _launch, empty_bytes, to_device, to_host

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

NAME = "cupy"


def quantise(x: Array, d: int, s: int, l2: bool, key: int, chunk: int) -> tuple[Floats, Levels]:
    """See `qsgd_numpy.quantise`; the results lie on the host."""
    n, count = np.int64(x.size), -(-x.size // d)
    norms, levels = empty_bytes(4 * count, x).view(np.float32), empty_bytes(2 * x.size, x).view(np.int16)
    _launch("qsgd_norms", x, count, (x, n, np.int64(d), np.int32(l2), norms))
    arguments = (x, n, np.int64(d), np.int32(s), norms, np.uint64(key), np.uint32(chunk), levels)
    _launch("qsgd_levels", x, -(-x.size // 8), arguments)
    found, all_levels = to_host(norms), to_host(levels)
    return found, all_levels[_held(found, d, x.size)]


def quantise_fixed(x: Array, d: int, s: int, l2: bool, key: int, chunk: int) -> tuple[Floats, Bytes, int]:
    """See `qsgd_numpy.quantise_fixed`."""
    norms, levels = quantise(x, d, s, l2, key, chunk)
    return norms, *family_for("codings", levels).encode(Coding.FIXED, levels, d, s)


def dequantise(levels: Levels, norms: Floats, d: int, s: int, out: Array, add: bool) -> None:
    """See `qsgd_numpy.dequantise`; levels and norms lie on the host."""
    whole = np.zeros(out.size, np.int16)
    whole[_held(norms, d, out.size)] = levels
    n, arrays = np.int64(out.size), (to_device(whole, out), to_device(norms, out))
    _launch("qsgd_dequantise", out, out.size, (*arrays, n, np.int64(d), np.int32(s), np.int32(add), out))


def decode_fixed(data: Bytes, norms: Floats, d: int, bits: int, out: Array, add: bool) -> None:
    """See `qsgd_numpy.decode_fixed`."""
    s, m = (1 << (bits - 1)) - 1, int(_held(norms, d, out.size).sum())
    dequantise(family_for("codings", data).decode(Coding.FIXED, data, bits * m, m, d, s), norms, d, s, out, add)


def _held(norms: Floats, d: int, n: int) -> Any:
    """Which elements lie in buckets whose norm is not 0."""
    return np.repeat(norms != 0, d)[:n]
