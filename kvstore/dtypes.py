"""The element types a store holds: their names, their accumulators, their bytes on the wire."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from kvstore.errors import ArrayError, PayloadError
from kvstore.messages import Frame, Key

NDArray: TypeAlias = np.ndarray[Any, Any]
DType: TypeAlias = np.dtype[Any]

_NAMES = (
    *("float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "bool"),
)
DTYPES: Mapping[str, DType] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    **{name: np.dtype(name) for name in _NAMES},
}
"""Every supported element type by name; 'bfloat16' is that of ml_dtypes."""

_HALF = frozenset(("float16", "bfloat16"))
_FLOAT = _HALF | {"float32", "float64"}
_WIDE: Mapping[DType, DType] = {DTYPES[name]: DTYPES["float32"] for name in _HALF}


def named_dtype(name: str, key: Key) -> DType:
    """Return the element type of that name, in native byte order.

    Raises:
        ArrayError: not a type that can be stored; names `key`.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ArrayError(
            f"the array for key {key!r} holds {name}, which cannot be stored; allowed are {', '.join(sorted(DTYPES))}",
            key=key,
        )
    return dtype


_KNOWN: Mapping[DType, DType] = {dtype: dtype for dtype in DTYPES.values()}


def stored_dtype(dtype: DType, key: Key) -> DType:
    """Return `dtype` in native byte order; errors as `named_dtype`, whose look-up by name takes microseconds."""
    return _KNOWN.get(dtype) or named_dtype(dtype.name, key)


def is_float(dtype: DType) -> bool:
    """Is this a floating point type (bfloat16 included)? Only those can be compressed."""
    return dtype.name in _FLOAT


def accumulator(dtype: DType) -> DType:
    """Return the type in which sums and master values are kept: float32 for half precision, else the type itself."""
    return _WIDE.get(dtype, dtype)


def as_bytes_view(flat: NDArray) -> memoryview:
    """Return the raw little-endian bytes of a contiguous array, shape (nbytes,), sharing its memory where possible."""
    if sys.byteorder == "big":
        flat = flat.byteswap()
    # Through uint8: the buffer protocol knows no bfloat16, and memoryview.cast no empty arrays.
    return flat.reshape(-1).view(np.uint8).data


def from_bytes(frame: Frame, dtype: DType) -> NDArray:
    """Return the flat array whose `as_bytes_view` is `frame`; read-only if the frame is, sharing its memory.

    Raises:
        PayloadError: the length is no multiple of the element size.
    """
    size = len(frame) if not isinstance(frame, memoryview) else frame.nbytes
    if size % dtype.itemsize:
        raise PayloadError(f"{size} bytes are no whole number of {dtype.name} elements of {dtype.itemsize} bytes")
    flat = np.frombuffer(frame, np.uint8).view(dtype) if size else np.empty(0, dtype)
    return flat.byteswap() if sys.byteorder == "big" else flat
