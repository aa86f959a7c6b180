"""The kernels of `sparse_numpy` on a CUDA device.

The strata are launched from `cuda/sparse.cu`. Selection and scattering are the reference itself over CuPy's own
partition and indexing: no thread of ours could select without waiting for others. Gaps are a byte string that is
sequential to read and short: they are packed and unpacked on the host.
"""

from __future__ import annotations

import numpy as np

from kvstore.compression.codec import Array
from kvstore.compression.kernels_cupy import _check as check
from kvstore.compression.kernels_cupy import _launch as launch
from kvstore.compression.sparse_numpy import scatter_add, select_largest

__all__ = ["gather_strata", "scatter_add", "scatter_strata_add", "select_largest"]


def gather_strata(x: Array, key: int, chunk: int, multiply: bool, values: Array) -> None:
    """See `sparse_numpy.gather_strata`."""
    k = values.size
    check(x, np.float32, x.size)
    check(values, np.float32, k)
    stream = (np.int64(k), np.uint64(key), np.uint32(chunk))
    launch("gather_strata", x, -(-k // 4), (x, np.int64(x.size), *stream, np.int32(multiply), values))


def scatter_strata_add(values: Array, key: int, chunk: int, out: Array) -> None:
    """See `sparse_numpy.scatter_strata_add`."""
    k = values.size
    check(values, np.float32, k)
    check(out, np.float32, out.size)
    stream = (np.int64(k), np.uint64(key), np.uint32(chunk))
    launch("scatter_strata_add", out, -(-k // 4), (values, np.int64(out.size), *stream, out))
