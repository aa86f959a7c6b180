"""The kernels on a CUDA device: same names as `kernels_numpy`, launched through CuPy. The only file that imports it.

The arrays of one call lie on one device, which need not be the current one. Each file of `cuda/` is compiled once per
process and kind of device, by NVRTC directly (see `cuda_text`), and loaded once per device.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nvrtc

from kvstore.compression import cuda_text
from kvstore.compression.codec import Array
from kvstore.compression.kernels_numpy import MOST_SUMMED, packed_size
from kvstore.errors import ArrayError

NAME = "cupy"

_THREADS = 256
_BLOCKS = 4096  # at most; a thread walks in strides of the whole grid


def max_abs(x: Array) -> float:
    """See `kernels_numpy.max_abs`. Waits for the device."""
    _check(x, np.float32, x.size)
    with x.device:
        largest = cupy.zeros(1, np.uint32)
    _launch("max_abs_bits", x, x.size, (x, np.int64(x.size), largest))
    value: float = struct.unpack("<f", struct.pack("<I", int(largest[0])))[0]
    return value


def quantise2(gradient: Array, residual: Array, threshold: float, out: Array) -> None:
    """See `kernels_numpy.quantise2`."""
    n = gradient.size
    _check(gradient, np.float32, n)
    _check(residual, np.float32, n)
    _check(out, np.uint8, packed_size(n))
    _launch("quantise2", out, out.size, (gradient, residual, np.int64(n), np.float32(threshold), out))


def decode2(data: Array, threshold: float, out: Array) -> None:
    """See `kernels_numpy.decode2`."""
    _check(out, np.float32, out.size)
    _check(data, np.uint8, packed_size(out.size))
    _launch("decode2", out, data.size, (data, np.int64(out.size), np.float32(threshold), out))


def decode2_add(data: Array, threshold: float, out: Array) -> None:
    """See `kernels_numpy.decode2_add`."""
    decode2_add_many([data], threshold, out)


def decode2_add_many(data: Sequence[Array], threshold: float, out: Array) -> None:
    """See `kernels_numpy.decode2_add_many`."""
    if not 1 <= len(data) <= MOST_SUMMED:
        raise ArrayError(f"{len(data)} payloads in one sum: 1 to {MOST_SUMMED} are counted at once")
    _check(out, np.float32, out.size)
    for one in data:
        _check(one, np.uint8, packed_size(out.size))
    with out.device:
        addresses = cupy.asarray(np.array([one.data.ptr for one in data], np.uint64))
    arguments = (addresses, np.int32(len(data)), np.int64(out.size), np.float32(threshold), out)
    _launch("decode2_add_many", out, data[0].size, arguments)


def empty_bytes(n: int, like: Array) -> Array:
    """A new array of n bytes on the device of `like`."""
    with like.device:
        return cupy.empty(n, np.uint8)


def to_host(data: Array) -> Array:
    """A copy in host memory."""
    return cupy.asnumpy(data)


def to_device(data: Array, like: Array) -> Array:
    """The same array on the device of `like`; moved there from the host or another device if need be."""
    with like.device:
        return cupy.asarray(data)


def warm_up() -> None:
    """Compile all of them for the current device."""
    for name in cuda_text.KERNELS:
        _function(name, cupy.cuda.Device().id)


def _launch(name: str, where: Array, threads: int, arguments: tuple[Any, ...]) -> None:
    """Run a kernel on the device of `where`, for `threads` pieces of work."""
    if threads:
        blocks = min(-(-threads // _THREADS), _BLOCKS)
        with where.device:
            _function(name, where.device.id)((blocks,), (_THREADS,), arguments)


@cache
def _function(name: str, device: int) -> Any:
    return _module(cuda_text.KERNELS[name], device).get_function(name)


@cache
def _module(file: str, device: int) -> Any:
    module = cupy.cuda.function.Module()
    module.load(_binary(file, cupy.cuda.Device(device).compute_capability))
    return module


@cache
def _binary(file: str, capability: str) -> bytes:
    """Machine code of one file for one kind of device, such as '90'."""
    program = nvrtc.createProgram(cuda_text.source(file), f"{file}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*cuda_text.OPTIONS, f"--gpu-architecture=sm_{capability}"))
        binary: bytes = nvrtc.getCUBIN(program)
        return binary
    finally:
        nvrtc.destroyProgram(program)


def _check(array: Array, dtype: type, size: int) -> None:
    if array.dtype != dtype or array.shape != (size,) or not array.flags.c_contiguous:
        raise ArrayError(
            f"a kernel takes a 1-d contiguous {np.dtype(dtype)} of {size} elements, "
            f"got {array.dtype} of shape {array.shape}"
        )
