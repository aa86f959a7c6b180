"""The kernels of `dithered_numpy` on a CUDA device: same names, launched from `cuda/dithered.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.compression.codec import Array
from kvstore.compression.dense_numpy import LANES, blocks_of
from kvstore.compression.kernels_cupy import _check as check
from kvstore.compression.kernels_cupy import _launch as launch
from kvstore.compression.kernels_cupy import empty_bytes
from kvstore.compression.kernels_numpy import packed_size


def encode_natural(x: Array, key: int, chunk: int, exponents: Array, signs: Array) -> None:
    """See `dithered_numpy.encode_natural`."""
    check(x, np.float32, x.size)
    check(exponents, np.uint8, x.size)
    check(signs, np.uint8, blocks_of(x.size, 8))
    launch("encode_natural", x, signs.size, (x, np.int64(x.size), *_stream(key, chunk), exponents, signs))


def decode_natural_add(exponents: Array, signs: Array, scale: float, out: Array) -> None:
    """See `dithered_numpy.decode_natural_add`."""
    check(out, np.float32, out.size)
    check(exponents, np.uint8, out.size)
    check(signs, np.uint8, blocks_of(out.size, 8))
    launch("decode_natural_add", out, out.size, (exponents, signs, np.int64(out.size), np.float32(scale), out))


def ternary_scales(x: Array, bucket: int, clip: float, scales: Array) -> None:
    """See `dithered_numpy.ternary_scales`."""
    check(x, np.float32, x.size)
    buckets = blocks_of(x.size, bucket)
    check(scales, np.float32, buckets)
    lanes, size = empty_bytes(8 * LANES * buckets, x).view(np.float64), (np.int64(x.size), np.int64(bucket))
    scales.fill(0)
    launch("ternary_lanes", x, buckets * LANES, (x, *size, lanes, scales))
    launch("ternary_limits", x, buckets, (lanes, *size, np.float64(clip), scales))


def encode_ternary(x: Array, scales: Array, bucket: int, key: int, chunk: int, out: Array) -> None:
    """See `dithered_numpy.encode_ternary`."""
    n = x.size
    check(x, np.float32, n)
    check(scales, np.float32, blocks_of(n, bucket))
    check(out, np.uint8, packed_size(n))
    arguments = (x, np.int64(n), scales, np.int64(bucket), *_stream(key, chunk), out)
    launch("encode_ternary", x, out.size // 2, arguments)


def decode_ternary_add(data: Array, scales: Array, bucket: int, out: Array) -> None:
    """See `dithered_numpy.decode_ternary_add`."""
    check(out, np.float32, out.size)
    check(scales, np.float32, blocks_of(out.size, bucket))
    check(data, np.uint8, packed_size(out.size))
    launch("decode_ternary_add", out, out.size, (data, np.int64(out.size), scales, np.int64(bucket), out))


def round_ints(x: Array, scales: Array, block: int, key: int, chunk: int, codes: Array) -> None:
    """See `dithered_numpy.round_ints`."""
    n = x.size
    check(x, np.float32, n)
    check(scales, np.float32, blocks_of(n, block))
    check(codes, np.int8, n)
    arguments = (x, np.int64(n), scales, np.int64(block), *_stream(key, chunk), codes)
    launch("round_ints", x, blocks_of(n, 8), arguments)


def _stream(key: int, chunk: int) -> tuple[Any, ...]:
    return np.uint64(key), np.uint32(chunk)
