"""Arrays in another dtype or place, without what NumPy would warn of."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.compression.codec import Array
from kvstore.compression.kernels import mover_for


def as_float32(x: Array) -> Array:
    """x as float32, itself where it is; what is too large becomes infinity."""
    if x.dtype == np.float32:
        return x
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def saturated(x: Array, dtype: np.dtype[Any]) -> Array:
    """x in a dtype that may be narrower: a finite value stays finite."""
    import ml_dtypes  # only here: what it takes to import is not spent by others

    if dtype.itemsize < x.dtype.itemsize:
        finfo: Any = ml_dtypes.finfo
        largest = float(finfo(dtype).max)
        x = np.where(np.isfinite(x), x.clip(-largest, largest), x)
    return x.astype(dtype)


def on_host(value: Any) -> Array:
    """An array, or a number as one, in host memory."""
    return mover_for(value).to_host(value) if hasattr(value, "dtype") else np.asarray(value)
