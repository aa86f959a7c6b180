"""The largest elements of a chunk as (index, value) pairs: what `dgc` and `ef21` send.

Bytes: k indices as ascending little-endian uint32, then their k values as float32. Selection is by array functions that
NumPy and CuPy share, so it runs where the gradient lies; equal magnitudes go to the lower index.
"""

from __future__ import annotations

import math

import numpy as np

from kvstore.compression.codec import Array, Context, Payload
from kvstore.compression.kernels import mover_for
from kvstore.errors import PayloadError

_LARGEST = float(np.finfo(np.float32).max)
PAIR = 8
"""Bytes of an index and its value."""


def count(n: int, ratio: float) -> int:
    """How many of n elements a ratio selects: rounded up, at least one of any."""
    return min(n, max(1, math.ceil(ratio * n)))


def select_top(x: Array, k: int) -> Array:
    """Indices, ascending, of the k elements that are largest in magnitude; ties go to the lower index."""
    if k >= x.size:
        return np.arange(x.size, like=x)
    sizes = np.abs(x)
    least = np.partition(sizes, x.size - k)[x.size - k]
    above = np.flatnonzero(sizes > least)
    equal = np.flatnonzero(sizes == least)[: k - above.size]
    return np.sort(np.concatenate([above, equal]))


def encode_top(x: Array, k: int) -> tuple[Payload, Array]:
    """The k largest elements of `x`, and their indices."""
    chosen = select_top(x, k)
    parts = [
        chosen.astype("<u4").view(np.uint8),
        x[chosen].clip(-_LARGEST, _LARGEST).astype("<f4", copy=False).view(np.uint8),
    ]
    return Payload(np.concatenate(parts)), chosen


def check(payload: Payload, ctx: Context) -> None:
    """Raise PayloadError unless indices ascend within the chunk and values are finite."""
    _pairs(payload, ctx)


def decode_add(payload: Payload, out: Array, ctx: Context) -> None:
    """out[index] += value. Raises PayloadError, before out is changed."""
    index, value = (mover_for(out).to_device(part, out) for part in _pairs(payload, ctx))
    with np.errstate(over="ignore"):
        out[index] += value.astype(out.dtype, copy=False)


def _pairs(payload: Payload, ctx: Context) -> tuple[Array, Array]:
    data = payload.data if hasattr(payload.data, "dtype") else np.frombuffer(payload.data, np.uint8)
    data = mover_for(data).to_host(data)
    k, rest = divmod(data.nbytes, PAIR)
    if rest or k > ctx.n or (k == 0 and ctx.n > 0):
        raise _broken(ctx, f"{data.nbytes} bytes are no pairs for 1 to {ctx.n} elements")
    index = data[: 4 * k].view("<u4").astype(np.int64)
    value = data[4 * k :].view("<f4")
    if k and (int(index[-1]) >= ctx.n or not bool((index[1:] > index[:-1]).all())):
        raise _broken(ctx, f"its indices do not ascend below {ctx.n}")
    if not np.isfinite(value).all():
        raise _broken(ctx, "a value is not finite")
    return index, value


def _broken(ctx: Context, what: str) -> PayloadError:
    return PayloadError(f"{ctx}: the payload is broken: {what}", key=ctx.key, rank=ctx.rank)
