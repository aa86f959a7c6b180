"""The kernels of `dense_numpy` on a CUDA device: same names, launched from `cuda/dense.cu`.

Sums of a bucket take three launches (lanes, fold, bits), since no thread waits for another: the text then also runs on
a CPU, where the tests compare it with the reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.compression.codec import Array
from kvstore.compression.dense_numpy import LANES, Format, blocks_of
from kvstore.compression.kernels_cupy import _check as check
from kvstore.compression.kernels_cupy import _launch as launch
from kvstore.compression.kernels_cupy import empty_bytes


def block_scales(x: Array, block: int, top: float, scales: Array) -> None:
    """See `dense_numpy.block_scales`."""
    check(x, np.float32, x.size)
    blocks = blocks_of(x.size, block)
    check(scales, np.float32, blocks)
    scales.fill(0)
    launch("block_maxima", x, blocks * LANES, (x, np.int64(x.size), np.int64(block), scales))
    launch("block_scales", x, blocks, (scales, np.int64(blocks), np.float32(top)))


def encode_floats(x: Array, scales: Array, block: int, kind: Format, codes: Array) -> None:
    """See `dense_numpy.encode_floats`."""
    _check_codes(x, scales, block, kind.dtype.type, codes)
    launch("encode_floats", x, x.size, (x, *_scaled(x.size, scales, block), *map(np.int32, kind), codes))


def decode_floats_add(codes: Array, scales: Array, block: int, kind: Format, out: Array) -> None:
    """See `dense_numpy.decode_floats_add`."""
    _check_codes(out, scales, block, kind.dtype.type, codes)
    arguments = (codes, *_scaled(out.size, scales, block), *map(np.int32, kind[:3]), out)
    launch("decode_floats_add", out, out.size, arguments)


def encode_ints(x: Array, scales: Array, block: int, codes: Array) -> None:
    """See `dense_numpy.encode_ints`."""
    _check_codes(x, scales, block, np.int8, codes)
    launch("encode_ints", x, x.size, (x, *_scaled(x.size, scales, block), codes))


def decode_ints_add(codes: Array, scales: Array, block: int, out: Array) -> None:
    """See `dense_numpy.decode_ints_add`."""
    _check_codes(out, scales, block, np.int8, codes)
    launch("decode_ints_add", out, out.size, (codes, *_scaled(out.size, scales, block), out))


def encode_signs(x: Array, residual: Array, bucket: int, means: int, scales: Array, bits: Array) -> None:
    """See `dense_numpy.encode_signs`."""
    n, buckets = x.size, blocks_of(x.size, bucket)
    for array, dtype, size in (
        (x, np.float32, n),
        (residual, np.float32, n),
        (scales, np.float32, buckets * means),
        (bits, np.uint8, blocks_of(n, 8)),
    ):
        check(array, dtype, size)
    lanes, counts = empty_bytes(8 * LANES * buckets, x).view(np.float32), empty_bytes(4 * buckets, x).view(np.uint32)
    counts.fill(0)
    size = (np.int64(n), np.int64(bucket))
    launch("sign_lanes", x, buckets * LANES, (x, residual, *size, lanes, counts))
    launch("sign_means", x, buckets, (lanes, counts, *size, np.int32(means), scales))
    launch("sign_bits", x, bits.size, (residual, *size, np.int32(means), scales, bits))


def decode_signs_add(bits: Array, scales: Array, bucket: int, means: int, out: Array) -> None:
    """See `dense_numpy.decode_signs_add`."""
    check(out, np.float32, out.size)
    check(scales, np.float32, blocks_of(out.size, bucket) * means)
    check(bits, np.uint8, blocks_of(out.size, 8))
    launch("decode_signs_add", out, out.size, (bits, *_scaled(out.size, scales, bucket), np.int32(means), out))


def _check_codes(x: Array, scales: Array, block: int, dtype: type, codes: Array) -> None:
    check(x, np.float32, x.size)
    check(scales, np.float32, blocks_of(x.size, block))
    check(codes, dtype, x.size)


def _scaled(n: int, scales: Array, block: int) -> tuple[Any, ...]:
    return np.int64(n), scales, np.int64(block)
