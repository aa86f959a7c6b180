"""The plain NumPy reference of the kernels that round at random: powers of two, three values, integers.

The twins `dithered_numba` and `dithered_cupy` give the same bits. Every element takes the 16-bit number that `philox`
draws for it under (key, chunk), and is rounded up in magnitude iff that number is below the fraction times 65,536.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.dense_numpy import _rows, _spread, blocks_of, lane_sums
from kvstore.compression.kernels_numpy import Bytes, Floats, packed_size
from kvstore.compression.philox import dither16_reference

_CODES = np.array([2, 0, 3], np.uint8)  # of -1, 0, 1
_VALUES = np.array([0, 0, -1, 1], np.float32)  # by code
_SHIFTS = np.array([6, 4, 2, 0], np.uint8)


def encode_natural(x: Floats, key: int, chunk: int, exponents: Bytes, signs: Bytes) -> None:
    """Round |x| to a power of two: exponents holds the float32 exponent field, 0 for zeros and denormals.

    What is 2^127 or more becomes 2^127. Sign bits: the first element in the top bit of the first byte.
    """
    bits = x.view(np.uint32)
    exponent, fraction = bits >> np.uint32(23) & np.uint32(255), bits & np.uint32(0x7FFFFF)
    up = dither16_reference(key, chunk, x.size).astype(np.uint32) << np.uint32(7) < fraction
    exponents[:] = exponent + (up & (exponent > 0) & (exponent < 254))
    signs[:] = np.packbits(bits >> np.uint32(31) == 1)


def decode_natural_add(exponents: Bytes, signs: Bytes, scale: float, out: Floats) -> None:
    """out += sign * 2^(exponent - 127) * scale, 0 for exponent 0."""
    sign = np.unpackbits(signs, count=out.size).astype(np.uint32) << np.uint32(31)
    value = (exponents.astype(np.uint32) << np.uint32(23) | sign).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        out += value * np.float32(scale)


def ternary_scales(x: Floats, bucket: int, clip: float, scales: Floats) -> None:
    """scales[b] = the largest |x| of bucket b, at most clip * its root mean square (of float64); 0 is no clip."""
    scales[:] = np.abs(_rows(x, bucket)).max(axis=1, initial=0)
    if clip:
        wide = x.astype(np.float64)
        size = np.minimum(x.size - np.arange(blocks_of(x.size, bucket)) * bucket, bucket)
        limit = np.sqrt(lane_sums(_rows(wide * wide, bucket)) / size) * clip
        scales[:] = np.where(limit < scales, limit, scales)


def encode_ternary(x: Floats, scales: Floats, bucket: int, key: int, chunk: int, out: Bytes) -> None:
    """sign(x) with probability min(|x| / scale, 1), else 0; two bits each, laid out as in `kernels_numpy`."""
    n = x.size
    scale = _spread(scales, bucket, n)
    share = np.divide(np.abs(x), scale, out=np.zeros_like(x), where=scale > 0)
    sent = dither16_reference(key, chunk, n).astype(np.float32) < share * np.float32(65536)
    codes = np.zeros(4 * packed_size(n), np.uint8)
    codes[:n] = np.where(sent, np.where(x < 0, _CODES[0], _CODES[2]), _CODES[1])
    out[:] = np.bitwise_or.reduce(codes.reshape(-1, 4) << _SHIFTS, axis=1)


def decode_ternary_add(data: Bytes, scales: Floats, bucket: int, out: Floats) -> None:
    """out += the scale times -1, 0 or 1."""
    codes = (data[:, None] >> _SHIFTS).reshape(-1)[: out.size] & 3
    with np.errstate(over="ignore", invalid="ignore"):
        out += _VALUES[codes] * _spread(scales, bucket, out.size)


def round_ints(x: Floats, scales: Floats, block: int, key: int, chunk: int, codes: NDArray[np.int8]) -> None:
    """codes = x / scale rounded at random to a neighbouring integer, within -127..127."""
    scale = _spread(scales, block, x.size)
    size = np.divide(np.abs(x), scale, out=np.zeros_like(x), where=scale > 0)
    below = np.floor(size)
    up = dither16_reference(key, chunk, x.size).astype(np.float32) < (size - below) * np.float32(65536)
    codes[:] = np.copysign(np.minimum(below + up, np.float32(127)), x).astype(np.int8)
