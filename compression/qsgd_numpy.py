"""The plain NumPy reference of the QSGD operator; `qsgd_numba` and `cuda/qsgd.cu` give the same bits.

Per bucket of d elements (the last may be shorter) with norm nu, in float32: a = min(|x| / nu * s, s), l = floor(a),
the level is l, or l + 1 where the element's 16-bit number is below (a - l) * 65536, with the sign of x. Levels of
buckets of norm 0 are left out. Decoded is nu * (level / s).

The l2 norm is that of 16 sums in float64, element i of the bucket going to sum i mod 16, added up as
8 + 8, 4 + 4, 2 + 2, 1 + 1; rounded to float32, at most its largest number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.codings import Coding, Levels
from kvstore.compression.codings_numpy import encode
from kvstore.compression.philox import dither16_reference

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

NAME = "numpy"

_LANES = 16
_LARGEST = float(np.finfo(np.float32).max)


def quantise(x: Floats, d: int, s: int, l2: bool, key: int, chunk: int) -> tuple[Floats, Levels]:
    """The norm of each bucket, and the levels of the buckets whose norm is not 0, one after the other.

    Args:
        x: finite. d: bucket size. s: levels, 1 to 32767. l2: the norm, else the largest |x|.
        key, chunk: of the random numbers; see `philox`.
    """
    dither = dither16_reference(key, chunk, x.size).astype(np.float32)
    norms = np.zeros(-(-x.size // d), np.float32)
    parts = []
    for number, start in enumerate(range(0, x.size, d)):
        size = np.abs(x[start : start + d])
        norms[number] = _l2(size) if l2 else size.max()
        if norms[number]:
            a = np.minimum(size / norms[number] * np.float32(s), np.float32(s))
            low = np.floor(a)
            up = dither[start : start + d] < (a - low) * np.float32(65536)
            level = low.astype(np.int32) + up
            parts.append(np.where(x[start : start + d] < 0, -level, level).astype(np.int16))
    return norms, np.concatenate(parts) if parts else np.zeros(0, np.int16)


def quantise_fixed(x: Floats, d: int, s: int, l2: bool, key: int, chunk: int) -> tuple[Floats, Bytes, int]:
    """`quantise` and the fixed coding in one pass: norms, bytes, bits."""
    norms, levels = quantise(x, d, s, l2, key, chunk)
    return norms, *encode(Coding.FIXED, levels, d, s)


def dequantise(levels: Levels, norms: Floats, d: int, s: int, out: Floats, add: bool) -> None:
    """out = (or +=) the decoded values; all finite."""
    at = 0
    for number, start in enumerate(range(0, out.size, d)):
        target = out[start : start + d]
        if not norms[number]:
            if not add:
                target[:] = 0
            continue
        values = norms[number] * (levels[at : at + target.size].astype(np.float32) / np.float32(s))
        at += target.size
        with np.errstate(over="ignore", invalid="ignore"):
            target[:] = target + values if add else values


def decode_fixed(data: Bytes, norms: Floats, d: int, bits: int, out: Floats, add: bool) -> None:
    """`dequantise` straight from the fixed coding: 4 or 8 bits, all levels allowed; d even with 4 bits."""
    codes = data if bits == 8 else np.stack([data >> 4, data & 15], axis=1).reshape(-1)
    s = (1 << (bits - 1)) - 1
    sizes = (codes & s).astype(np.int16)
    dequantise(np.where(codes > s, -sizes, sizes), norms, d, s, out, add)


def _l2(size: Floats) -> float:
    lanes = np.zeros(-(-size.size // _LANES) * _LANES)
    lanes[: size.size] = size
    total = np.zeros(_LANES)
    for row in lanes.reshape(-1, _LANES) ** 2:
        total += row
    for half in (8, 4, 2, 1):
        total = total[:half] + total[half : 2 * half]
    return min(float(np.sqrt(total[0])), _LARGEST)
