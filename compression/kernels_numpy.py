"""The plain NumPy reference of every kernel: the oracle of the tests, and what serves without numba.

Arrays are 1-d and contiguous; data and results are the same, bit for bit, in all twins (`kernels_numba`,
`kernels_cupy`). Work goes in blocks that stay in the cache.

2-bit bytes: element i of a chunk lies in byte i // 4 at shift 6 - 2 * (i % 4); 11 is +t, 10 is -t, 00 and 01
are nothing (01 is never written). The buffer is padded with 00 to a multiple of 4 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

NAME = "numpy"
MOST_SUMMED = 127
"""Payloads that one integer count takes: 127 codes of -1, 0, 1 stored as 0, 1, 2 fit a byte."""

_BLOCK = 16384
_SHIFTS = np.array([6, 4, 2, 0], np.uint8)
_VALUE = np.array([0, 0, -1, 1], np.int32)  # by code


def packed_size(n: int) -> int:
    """Bytes that n two-bit codes take: 16 codes in each 4-byte word."""
    return 4 * -(-n // 16)


def max_abs(x: Floats) -> float:
    """The largest |x|; infinity or NaN if any is among x (NaN wins). Denormals count."""
    largest = [np.abs(x[span]).max() for span in _spans(x.size)]
    return float(np.max(largest)) if largest else 0.0


def quantise2(gradient: Floats, residual: Floats, threshold: float, out: Bytes) -> None:
    """r += g; write 11 and r -= t where r >= t, 10 and r += t where r <= -t, else 00."""
    t = np.float32(threshold)
    out[:] = 0
    for span in _spans(gradient.size):
        r = residual[span]
        with np.errstate(over="ignore", invalid="ignore"):
            r += gradient[span]
            up, down = r >= t, r <= -t
            np.subtract(r, t, out=r, where=up)
            np.add(r, t, out=r, where=down)
        codes = np.zeros(4 * -(-r.size // 4), np.uint8)
        codes[: r.size] = up * np.uint8(3) + down * np.uint8(2)
        packed = np.bitwise_or.reduce(codes.reshape(-1, 4) << _SHIFTS, axis=1)
        out[span.start // 4 : span.start // 4 + packed.size] = packed


def decode2(data: Bytes, threshold: float, out: Floats) -> None:
    """out = the decoded values: +t, -t or 0."""
    for span in _spans(out.size):
        out[span] = _values(data, span).astype(np.float32) * np.float32(threshold)


def decode2_add(data: Bytes, threshold: float, out: Floats) -> None:
    """out += the decoded values."""
    decode2_add_many([data], threshold, out)


def decode2_add_many(data: Sequence[Bytes], threshold: float, out: Floats) -> None:
    """out += t * (the sum of the codes as integers): rounded once, whatever the order. 1 to 127 payloads."""
    for span in _spans(out.size):
        count = np.sum([_values(one, span) for one in data], axis=0)
        with np.errstate(over="ignore", invalid="ignore"):
            out[span] += count.astype(np.float32) * np.float32(threshold)


def empty_bytes(n: int, like: NDArray[Any]) -> Bytes:
    """A new array of n bytes where `like` lies."""
    return np.empty(n, np.uint8)


def to_host(data: NDArray[Any]) -> NDArray[Any]:
    """The same array in host memory."""
    return data


def to_device(data: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """The same array where `like` lies."""
    return data if isinstance(data, np.ndarray) else np.asarray(data.get())


def warm_up() -> None:
    """Nothing to compile."""


def _values(data: Bytes, span: slice) -> NDArray[np.int32]:
    block = data[span.start // 4 : -(-span.stop // 4)]
    codes = (block[:, None] >> _SHIFTS) & 3
    values: NDArray[np.int32] = _VALUE[codes.reshape(-1)[: span.stop - span.start]]
    return values


def _spans(n: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK, n)) for start in range(0, n, _BLOCK))
