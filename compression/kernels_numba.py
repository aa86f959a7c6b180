"""The CPU kernels in numba: same names, same bits as `kernels_numpy`. Imported on first use only.

Shape of all of them: a branch-free loop over one code per byte in a scratch that stays in the L1 cache, and a
pack or spread loop over 32-bit words. The compiled functions take addresses, not arrays: there is one
specialisation of each whatever array comes (read-only, a view, bytes from a socket), and nothing is ever
compiled in the middle of a push. The public functions below check everything before an address is taken.
All compiled functions stay in this one file: numba's cache does not notice changes of a helper elsewhere.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.kernels_numpy import MOST_SUMMED, Bytes, Floats, empty_bytes, packed_size, to_device, to_host
from kvstore.errors import ArrayError

__all__ = [
    "NAME",
    "decode2",
    "decode2_add",
    "decode2_add_many",
    "empty_bytes",
    "max_abs",
    "quantise2",
    "to_device",
    "to_host",
    "warm_up",
]

NAME = "numba"

# numba's own annotations describe Python calls, not compiled ones: here everything of it is Any
_numba: Any = importlib.import_module("numba")
_ir: Any = importlib.import_module("llvmlite.ir")
carray, float32, uint8, uint32 = _numba.carray, _numba.float32, _numba.uint8, _numba.uint32
types, intrinsic = _numba.types, importlib.import_module("numba.extending").intrinsic

_FLOAT, _BYTE = np.dtype(np.float32), np.dtype(np.uint8)
_BLOCK = 512  # elements; the scratch of codes takes as many bytes
_AHEAD = 1024  # bytes in front of the loop at which memory is asked for; measured, as is the block


def _jit(function: Callable[..., Any]) -> Any:
    """Compile on first call, without the GIL, exact arithmetic; cached on disk where that is possible."""
    options = {"nogil": True, "fastmath": False, "error_model": "numpy"}
    try:
        return _numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no place for a cache: a zip file, a read-only container without a home
        return _numba.njit(cache=False, **options)(function)


def _pointer_to(item: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def pointer(typing: Any, address: Any) -> Any:
        signature = types.CPointer(item)(types.intp)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return signature, generate

    return pointer


_floats_at = _pointer_to(types.float32)
_bytes_at = _pointer_to(types.uint8)
_words_at = _pointer_to(types.uint32)


def _prefetch_for(write: int) -> Any:
    """Ask for the cache line at an address; an address outside the array does no harm."""

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def prefetch(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], _ir.IntType(8).as_pointer())
            number = _ir.IntType(32)
            kind = _ir.FunctionType(_ir.VoidType(), [pointer.type, number, number, number])
            call = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
            builder.call(call, [pointer, number(write), number(3), number(1)])
            return context.get_dummy_value()

        return types.void(types.intp), generate

    return prefetch


_prefetch_read = _prefetch_for(0)
_prefetch_write = _prefetch_for(1)


@_jit
def _max_bits(address, n):  # type: ignore[no-untyped-def]
    # as integers: float comparisons with NaN would keep the loop from being vectorised
    bits = carray(_words_at(address), n)
    largest = uint32(0)
    for base in range(0, n, _BLOCK):
        block = bits[base : min(base + _BLOCK, n)]
        for line in range(4 * base + 2 * _AHEAD, 4 * (base + len(block)) + 2 * _AHEAD, 64):
            _prefetch_read(address + line)
        for i in range(len(block)):
            largest = max(largest, uint32(block[i] & uint32(0x7FFFFFFF)))
    return largest


@_jit
def _quantise2(gradient, residual, n, threshold, out):  # type: ignore[no-untyped-def]
    t = np.float32(threshold)
    g = carray(_floats_at(gradient), n)
    r = carray(_floats_at(residual), n)
    packed = carray(_bytes_at(out), (n + 15) // 16 * 4)
    codes = np.empty(_BLOCK, np.uint8)
    words = codes.view(np.uint32)
    for base in range(0, n, _BLOCK):
        m = min(_BLOCK, n - base)
        g_block, r_block = g[base : base + m], r[base : base + m]
        out_block = packed[base // 4 : base // 4 + (m + 15) // 16 * 4]
        if m < _BLOCK:
            codes[:] = 0
        for line in range(4 * base + _AHEAD, 4 * (base + m) + _AHEAD, 64):
            _prefetch_read(gradient + line)
            _prefetch_write(residual + line)
        for i in range(m):
            v = r_block[i] + g_block[i]
            up, down = v >= t, v <= -t
            codes[i] = uint8(up) + (uint8(up | down) << uint8(1))
            lowered = v - t if up else v
            r_block[i] = v + t if down else lowered
        for j in range(len(out_block)):
            # four codes, one in each byte, meet in the top byte of the product: the first in its top two bits
            out_block[j] = uint8(uint32(words[j] * uint32(0x40100401)) >> uint32(24))


@_jit
def _spread(byte):  # type: ignore[no-untyped-def]
    """Four codes -> four bytes of value + 1: 0, 1 or 2. The low bit counts only below a high bit: 01 is nothing."""
    x = uint32(byte)
    y = uint32(
        uint32(x >> uint32(6))
        | uint32(uint32(x << uint32(4)) & uint32(0x300))
        | uint32(uint32(x << uint32(14)) & uint32(0x30000))
        | uint32(uint32(x << uint32(24)) & uint32(0x3000000))
    )
    high = uint32(uint32(y >> uint32(1)) & uint32(0x01010101))
    low = uint32(y & high)
    return uint32(uint32(uint32(0x01010101) - high) + uint32(low << uint32(1)))


@_jit
def _decode2(data, n, threshold, out):  # type: ignore[no-untyped-def]
    t = np.float32(threshold)
    packed = carray(_bytes_at(data), (n + 15) // 16 * 4)
    values = carray(_floats_at(out), n)
    words = np.empty(_BLOCK // 4, np.uint32)
    counts = words.view(np.uint8)
    for base in range(0, n, _BLOCK):
        m = min(_BLOCK, n - base)
        block, target = packed[base // 4 : base // 4 + (m + 3) // 4], values[base : base + m]
        for line in range(4 * base + _AHEAD, 4 * (base + m) + _AHEAD, 64):
            _prefetch_write(out + line)
        for j in range(len(block)):
            words[j] = _spread(block[j])
        for i in range(m):
            target[i] = (float32(counts[i]) - float32(1)) * t


@_jit
def _decode2_add_many(data, n, threshold, out):  # type: ignore[no-untyped-def]
    t, k = np.float32(threshold), len(data)
    zero = float32(k)  # k payloads of value 0, each counted as value + 1
    values = carray(_floats_at(out), n)
    words = np.empty(_BLOCK // 4, np.uint32)
    counts = words.view(np.uint8)
    for base in range(0, n, _BLOCK):
        m = min(_BLOCK, n - base)
        target = values[base : base + m]
        for line in range(4 * base + _AHEAD, 4 * (base + m) + _AHEAD, 64):
            _prefetch_write(out + line)
        block = carray(_bytes_at(data[0] + base // 4), (m + 3) // 4)
        for j in range(len(block)):
            words[j] = _spread(block[j])
        for q in range(1, k):
            block = carray(_bytes_at(data[q] + base // 4), (m + 3) // 4)
            for j in range(len(block)):
                words[j] = uint32(words[j] + _spread(block[j]))
        for i in range(m):
            target[i] += (float32(counts[i]) - zero) * t


def max_abs(x: Floats) -> float:
    """See `kernels_numpy.max_abs`."""
    x = _readable(x, _FLOAT)
    bits = _max_bits(_address(x), x.size)
    value: float = struct.unpack("<f", struct.pack("<I", int(bits)))[0]
    return value


def quantise2(gradient: Floats, residual: Floats, threshold: float, out: Bytes) -> None:
    """See `kernels_numpy.quantise2`."""
    n = gradient.size
    gradient = _readable(gradient, _FLOAT)
    _writable(residual, _FLOAT, n)
    _writable(out, _BYTE, packed_size(n))
    _quantise2(_address(gradient), _address(residual), n, float(threshold), _address(out))


def decode2(data: Bytes, threshold: float, out: Floats) -> None:
    """See `kernels_numpy.decode2`."""
    _writable(out, _FLOAT, out.size)
    data = _packed(data, out.size)
    _decode2(_address(data), out.size, float(threshold), _address(out))


def decode2_add(data: Bytes, threshold: float, out: Floats) -> None:
    """See `kernels_numpy.decode2_add`."""
    decode2_add_many([data], threshold, out)


def decode2_add_many(data: Sequence[Bytes], threshold: float, out: Floats) -> None:
    """See `kernels_numpy.decode2_add_many`."""
    if not 1 <= len(data) <= MOST_SUMMED:
        raise ArrayError(f"{len(data)} payloads in one sum: 1 to {MOST_SUMMED} are counted at once")
    _writable(out, _FLOAT, out.size)
    packed = [_packed(one, out.size) for one in data]  # kept alive while their addresses are in use
    addresses = np.array([_address(one) for one in packed], np.int64)
    _decode2_add_many(addresses, out.size, float(threshold), _address(out))


def warm_up() -> None:
    """Compile all of them, or load them from the cache."""
    x, out = np.zeros(64, np.float32), np.zeros(16, np.uint8)
    max_abs(x)
    quantise2(x, x.copy(), 0.5, out)
    decode2(out, 0.5, x)
    decode2_add_many([out], 0.5, x)


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _readable(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """`array`, or an aligned contiguous copy."""
    if array.dtype != dtype or array.ndim != 1:
        raise ArrayError(f"a kernel reads 1-d {dtype}, got {array.ndim}-d {array.dtype}")
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else array.copy()


def _packed(data: Bytes, n: int) -> Bytes:
    data = _readable(data, _BYTE)
    if data.size != packed_size(n):
        raise ArrayError(f"{data.size} packed bytes for {n} elements: {packed_size(n)} are needed")
    return data


def _writable(array: NDArray[Any], dtype: np.dtype[Any], size: int) -> None:
    if array.dtype != dtype or array.shape != (size,) or not array.flags.carray:
        raise ArrayError(
            f"a kernel writes a 1-d contiguous, aligned, writable {dtype} of {size} elements, "
            f"got {array.dtype} of shape {array.shape}"
        )
