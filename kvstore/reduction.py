"""Sums of one key's arrays within a process, one array per device, in list order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvstore.arrays import Template, describe, host_view
from kvstore.dtypes import DType, accumulator
from kvstore.errors import ArrayError
from kvstore.messages import Key


def check_match(template: Template, array: Any, key: Key, what: str) -> None:
    """Compare an array with its key, without touching its elements.

    Raises:
        ArrayError: another shape or element type; Python numbers take the key's type if they fit.
    """
    given = describe(array, key)
    if given.kind == "python":
        host_view(array, key, template.dtype)
        given = Template(given.shape, template.dtype, given.kind)
    if (given.shape, given.dtype) != (template.shape, template.dtype):
        raise ArrayError(
            f"{what} of key {key!r}: got shape {given.shape} of {given.dtype.name}, the key has shape "
            f"{template.shape} of {template.dtype.name}; broadcast redefines a key",
            key=key,
        )


def flattened(array: Any, key: Key, dtype: DType, on_device: bool) -> Any:
    """Return the elements in C order, shape (n,), contiguous: a view where possible.

    Args:
        array: of any library. key: named in errors. dtype: what Python numbers become.
        on_device: leave CuPy arrays on their device; all others come to the host as NumPy.
    """
    if on_device and describe(array, key).kind == "cupy":
        with current(array):
            return array.reshape(-1)
    return host_view(array, key, dtype).reshape(-1)


def sum_in_order(arrays: Sequence[Any], dtype: DType) -> Any:
    """Add flat arrays of one key: ((first + second) + third) ...

    Args:
        arrays: flat, NumPy or CuPy, of the key's `dtype`.

    Returns:
        a new array (n,) where the first one lies, of the accumulator's type: float32 for half precision, integers
        wrap, bool is logical or.
    """
    first = arrays[0]
    with current(first):
        total = first.astype(accumulator(dtype))
        for array in arrays[1:]:
            total += to_device(array, first) if on_cuda(first) else to_host(array)
    return total


def on_cuda(flat: Any) -> bool:
    """Is this a CuPy array (rather than NumPy)?"""
    return hasattr(flat, "device") and not isinstance(flat.device, str)


def current(flat: Any) -> AbstractContextManager[object]:
    """Make the device of a CuPy array the current one, as its kernels need; nothing for NumPy."""
    return flat.device if on_cuda(flat) else nullcontext()


def to_host(flat: Any) -> Any:
    """Return a NumPy array of the same elements; itself if it is one."""
    return host_view(flat, "") if on_cuda(flat) else flat


def to_device(flat: Any, like: Any) -> Any:
    """Return `flat` on the device of the CuPy array `like`, which must be the current one.

    `ndarray.copy` moves between devices with and without peer access.
    """
    if not on_cuda(flat):
        staged = type(like)(flat.shape, flat.dtype)
        staged.set(flat)
        return staged
    return flat if flat.device == like.device else flat.copy()
