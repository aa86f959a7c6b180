"""The plain NumPy reference of the kernels that touch every element: small floats, scaled blocks, one bit.

The twins `dense_numba` and `dense_cupy` give the same bits. Arrays are 1-d and contiguous. Blocks (buckets) start at
multiples of `block`; the last may be shorter.

A scale is 0 where the block's largest magnitude is so small that the quotient would be below the smallest normal
float32: such a block, all zeros above all, decodes to exact zeros, and nothing is divided by zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.kernels_numpy import Bytes, Floats

LANES = 64
"""Sums run in this many lanes, element i in lane i % LANES, which are then folded in halves: the same in all twins."""

SHRINK = 2.0**-16
"""Magnitudes are summed times this, so that 65,536 of the largest float32 do not overflow."""

LARGEST = np.float32(np.finfo(np.float32).max)
SMALLEST = np.float32(np.finfo(np.float32).tiny)


class Format(NamedTuple):
    """A floating type of one or two bytes: mantissa bits, exponent bias, and the code of its largest finite value."""

    nbytes: int
    mantissa: int
    bias: int
    top: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the codes."""
        return np.dtype(np.uint8 if self.nbytes == 1 else "<u2")

    @property
    def magnitude(self) -> int:
        """All bits of a code but the sign."""
        return (1 << (8 * self.nbytes - 1)) - 1

    @property
    def largest(self) -> float:
        """The largest finite value."""
        exponent, fraction = divmod(self.top, 1 << self.mantissa)
        return float((1 + fraction / (1 << self.mantissa)) * 2.0 ** (exponent - self.bias))


FP16 = Format(2, 10, 15, 0x7BFF)
BF16 = Format(2, 7, 127, 0x7F7F)
E4M3 = Format(1, 3, 7, 0x7E)  # no infinity, one NaN: the type that ml_dtypes calls float8_e4m3fn
E5M2 = Format(1, 2, 15, 0x7B)


def blocks_of(n: int, block: int) -> int:
    """How many blocks n elements take."""
    return -(-n // block)


def block_scales(x: Floats, block: int, top: float, scales: Floats) -> None:
    """scales[b] = (largest |x| of block b) / top, rounded down where top times it would overflow, 0 if tiny."""
    largest = np.abs(_rows(x, block)).max(axis=1, initial=0)
    with np.errstate(over="ignore", under="ignore"):
        scale = largest / np.float32(top)
        over = np.isinf(scale * np.float32(top))
    scale = np.where(over, np.nextafter(scale, np.float32(0)), scale)
    scales[:] = np.where(scale < SMALLEST, np.float32(0), scale)


def encode_floats(x: Floats, scales: Floats, block: int, kind: Format, codes: NDArray[Any]) -> None:
    """codes = x / scale as small floats, to nearest, ties to even; what is too large becomes the largest finite."""
    scale = _spread(scales, block, x.size)
    f = np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)
    bits = f.view(np.uint32)
    magnitude, drop = bits & np.uint32(0x7FFFFFFF), 23 - kind.mantissa
    rounding = np.uint32((1 << (drop - 1)) - 1) + ((magnitude >> np.uint32(drop)) & np.uint32(1))
    normal = ((magnitude + rounding) >> np.uint32(drop)) - np.uint32((127 - kind.bias) << kind.mantissa)
    # below the smallest normal: the sum with 2^23 smallest steps has the rounded count in its low bits
    magic = np.float32(2.0 ** (24 - kind.bias - kind.mantissa))
    small = (np.abs(f) + magic).view(np.uint32) - magic.view(np.uint32)
    code = np.where(np.abs(f) < np.float32(2.0 ** (1 - kind.bias)), small, np.minimum(normal, np.uint32(kind.top)))
    codes[:] = code | ((bits >> np.uint32(31)) << np.uint32(8 * kind.nbytes - 1))


def decode_floats_add(codes: NDArray[Any], scales: Floats, block: int, kind: Format, out: Floats) -> None:
    """out += value of the code * scale. Codes are finite ones."""
    wide = codes.astype(np.uint32)
    bits = ((wide & np.uint32(kind.magnitude)) << np.uint32(23 - kind.mantissa)) | (
        (wide >> np.uint32(8 * kind.nbytes - 1)) << np.uint32(31)
    )
    value = bits.view(np.float32) * np.float32(2.0 ** (127 - kind.bias))
    with np.errstate(over="ignore", invalid="ignore"):
        out += value * _spread(scales, block, out.size)


def encode_ints(x: Floats, scales: Floats, block: int, codes: NDArray[np.int8]) -> None:
    """codes = x / scale to the nearest integer, ties to even, within -127..127."""
    scale = _spread(scales, block, x.size)
    value = np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)
    codes[:] = np.clip(np.rint(value), -127, 127).astype(np.int8)


def decode_ints_add(codes: NDArray[np.int8], scales: Floats, block: int, out: Floats) -> None:
    """out += code * scale."""
    with np.errstate(over="ignore", invalid="ignore"):
        out += codes.astype(np.float32) * _spread(scales, block, out.size)


def encode_signs(x: Floats, residual: Floats, bucket: int, means: int, scales: Floats, bits: Bytes) -> None:
    """residual += x; one bit per element, 1 where it is >= 0; residual -= what the bit stands for.

    means 2: scales holds for each bucket the mean of the elements >= 0, then the mean magnitude of the others.
    means 1: one mean magnitude for both. Bits: the first element in the top bit of the first byte.
    `bucket` is a multiple of LANES up to 65,536.
    """
    n = x.size
    with np.errstate(over="ignore", invalid="ignore"):
        residual += x
    up = residual >= 0
    shrunk = np.abs(residual) * np.float32(SHRINK)
    zero = np.float32(0)
    sums = [lane_sums(_rows(np.where(one, shrunk, zero), bucket)) for one in (up, ~up)]
    size = np.minimum(n - np.arange(blocks_of(n, bucket)) * bucket, bucket)
    above = _rows(up.astype(np.int64), bucket).sum(axis=1)
    if means == 2:
        pairs = np.stack([_mean(sums[0], above), _mean(sums[1], size - above)], axis=1)
    else:
        pairs = np.repeat(_mean(sums[0] + sums[1], size)[:, None], 2, axis=1)
    scales[:] = pairs[:, :means].reshape(-1)
    residual -= np.where(up, _spread(pairs[:, 0], bucket, n), -_spread(pairs[:, 1], bucket, n))
    bits[:] = np.packbits(up)


def decode_signs_add(bits: Bytes, scales: Floats, bucket: int, means: int, out: Floats) -> None:
    """out += the scale of the element's bit: + the first, - the last of its bucket."""
    up = np.unpackbits(bits, count=out.size).astype(bool)
    pairs = scales.reshape(-1, means)
    values = np.where(up, _spread(pairs[:, 0], bucket, out.size), -_spread(pairs[:, -1], bucket, out.size))
    with np.errstate(over="ignore", invalid="ignore"):
        out += values


def lane_sums(rows: NDArray[Any]) -> NDArray[Any]:
    """The sum of each row in the fixed order that all twins keep (see LANES)."""
    lanes = rows.reshape(rows.shape[0], rows.shape[1] // LANES, LANES)
    total = lanes[:, 0].copy()
    for step in range(1, lanes.shape[1]):
        total += lanes[:, step]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def _mean(total: Floats, count: NDArray[np.int64]) -> Floats:
    mean = total / np.maximum(count, 1).astype(np.float32)
    with np.errstate(over="ignore"):
        return np.minimum(mean * np.float32(1 / SHRINK), LARGEST)


def _rows(x: NDArray[Any], block: int) -> NDArray[Any]:
    """One row per block, the last filled up with zeros."""
    padded = np.zeros(blocks_of(x.size, block) * block, x.dtype)
    padded[: x.size] = x
    return padded.reshape(-1, block)


def _spread(scales: Floats, block: int, n: int) -> Floats:
    """Each element's scale."""
    return np.repeat(scales, block)[:n] if scales.size > 1 else np.full(n, scales[0] if n else 0, np.float32)
