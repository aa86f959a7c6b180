"""Philox4x32-10 on a CUDA device: the same bits as `philox`."""

from __future__ import annotations

import numpy as np

from kvstore.compression.codec import Array
from kvstore.compression.kernels_cupy import _launch, empty_bytes
from kvstore.compression.philox import PER_BLOCK


def dither16(key: int, chunk: int, n: int, like: Array) -> Array:
    """See `philox.dither16_reference`; the numbers lie on the device of `like`."""
    out = empty_bytes(2 * n, like).view(np.uint16)
    _launch("dither16", like, -(-n // PER_BLOCK), (np.uint64(key), np.uint32(chunk), np.int64(n), out))
    return out
