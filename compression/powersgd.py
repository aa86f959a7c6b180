"""PowerSGD: a matrix is sent as two thin ones, P Q^T of rank r (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727).

A key of shape (a, ...) is the matrix M of a rows. One power iteration, started from the Q of the round before (the
paper's warm start): P = M Q, orthonormalised, Q = M^T P. Each worker sends its own P and Q in one message, and the
server adds all P Q^T; the paper's two all-reduces would need a barrier between P and Q. Error feedback is wrapped
around it, as the paper needs. Keys of fewer than two dimensions, and those that would not get smaller, travel raw.

Matrix products and the orthonormalisation run where the gradient lies, by array functions that NumPy and CuPy share:
the time is in two products of BLAS or cuBLAS, so there are no kernels of our own. Decoding adds outer products in a
fixed order, element by element, so that workers and servers compute the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np

from kvstore.compression.codec import (
    Array,
    CompressionType,
    Context,
    Params,
    Payload,
    State,
    payload_bytes,
    payload_number,
)
from kvstore.compression.kernels import kernels_for, mover_for
from kvstore.compression.philox import Purpose, stream_key, words
from kvstore.errors import PayloadError

_LARGEST = float(np.finfo(np.float32).max)
_SLACK = 1.01  # columns of P are of length 1 up to rounding
_NOTHING = 1e-30  # a column that is shorter than this, next to elements up to 1, holds no direction


class PowerSgdParams(Params, frozen=True, tag=CompressionType.POWERSGD.value):
    """rank: columns of P and Q; 1 to 4 in the paper."""

    rank: Annotated[int, msgspec.Meta(ge=1, le=256)] = 2


class PowerSgd:
    """Low-rank approximation of whole matrices by one warm-started power iteration."""

    params_type: ClassVar[type[Params]] = PowerSgdParams
    unit: ClassVar[Literal["chunk", "key"]] = "key"
    unbiased: ClassVar[bool] = False
    contraction: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    feedback: ClassVar[bool] = True

    def __init__(self, params: PowerSgdParams | None = None) -> None:
        self.own = params or PowerSgdParams()
        self.params: Params = self.own

    def encoded_bytes(self, shape: tuple[int, ...]) -> int | None:
        """4 r (a + b); None for what is no matrix. See `SizedByShape`."""
        if len(shape) < 2 or 0 in shape:
            return None
        rows, columns = matrix_of(shape)
        return 4 * min(self.own.rank, rows, columns) * (rows + columns)

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """That of float32, which is what becomes of keys that are no matrices here."""
        return 4 * n

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """P, then Q, float32 by rows; `state` holds Q as `q`, flat."""
        size = self.encoded_bytes(ctx.shape) if math.prod(ctx.shape) == ctx.n else None
        if size is None or size >= 4 * ctx.n:
            return Payload(x.astype("<f4").view(np.uint8), {"rows": ctx.n, "columns": 1, "rank": 0, "scale": 1.0}), None
        rows, columns = matrix_of(ctx.shape)
        rank = min(self.own.rank, rows, columns)
        q = self._start(columns, rank, x, ctx) if state is None else state["q"].reshape(columns, -1)
        if q.shape[1] != rank:
            q = self._start(columns, rank, x, ctx)
        scale = kernels_for(x).max_abs(x)
        matrix = x.reshape(rows, columns) / np.float32(scale or 1)  # so that no square can overflow
        p = orthonormal(matrix @ q)
        new = matrix.T @ p
        found = (p != 0).any(axis=0)
        data = np.concatenate([p.reshape(-1), new.reshape(-1)]).astype("<f4", copy=False).view(np.uint8)
        meta = {"rows": rows, "columns": columns, "rank": rank, "scale": float(scale)}
        return Payload(data, meta), {"q": np.where(found, new, q).reshape(-1)}

    def check(self, payload: Payload, ctx: Context) -> None:
        """Sizes, and values that cannot overflow; see `Codec.check`."""
        _factors(payload, ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out += scale * P Q^T; see `Codec.decode_add`."""
        scale, p, q = _factors(payload, ctx)
        if p is None:
            values = q.reshape(-1)
        else:
            p, q = mover_for(out).to_device(p, out), mover_for(out).to_device(q, out)
            product = p[:, :1] * q[:, 0]
            for column in range(1, p.shape[1]):
                product += p[:, column : column + 1] * q[:, column]
            with np.errstate(over="ignore"):
                product *= np.float32(scale)
            values = product.reshape(-1).clip(-_LARGEST, _LARGEST)
        with np.errstate(over="ignore"):
            out += mover_for(out).to_device(values, out).astype(out.dtype, copy=False)

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """Sums of factors have a higher rank; servers decode them."""
        return None

    def _start(self, columns: int, rank: int, like: Array, ctx: Context) -> Array:
        """The first Q, alike on all workers: uniform in [-1, 1)."""
        key = stream_key(self.own.seed, Purpose.START, 0, ctx.key, 0)
        drawn = words(key, 0, columns * rank).astype(np.float64) / 2**31 - 1
        return mover_for(like).to_device(drawn.astype(np.float32), like).reshape(columns, rank)


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the matrix that an array of two dimensions or more is."""
    return shape[0], math.prod(shape[1:])


def orthonormal(p: Array) -> Array:
    """The columns of `p` made orthonormal, in float64 and in order (modified Gram-Schmidt, twice); float32.

    A column that is nothing, or nothing but what those before it hold, becomes zero.
    """
    p = p.astype(np.float64)
    for column in range(p.shape[1]):
        size = _length(p[:, column])
        for _ in range(2):
            for before in range(column):
                p[:, column] -= _dot(p[:, before], p[:, column]) * p[:, before]
        length = _length(p[:, column])
        # what is left of a column within the others' span is rounding alone
        p[:, column] = p[:, column] / length if length > max(_NOTHING, 1e-6 * size) else 0
    return p.astype(np.float32)


def _dot(a: Array, b: Array) -> Any:
    return (a * b).sum()


def _length(a: Array) -> float:
    return math.sqrt(float(_dot(a, a)))


def _factors(payload: Payload, ctx: Context) -> tuple[float, Array | None, Array]:
    """Scale, P and Q; P is None where the values themselves were sent."""
    rows, columns, rank = (_whole_number(payload, name, ctx) for name in ("rows", "columns", "rank"))
    scale = payload_number(payload, "scale", ctx)
    if rows * columns != ctx.n or rank > min(rows, columns) or not 0 <= scale <= _LARGEST:
        raise _broken(ctx, f"a {rows} x {columns} matrix of rank {rank} and scale {scale}")
    expected = 4 * rank * (rows + columns) if rank else 4 * ctx.n
    values = mover_for(payload.data).to_host(payload_bytes(payload, expected, ctx)).view("<f4")
    if not np.isfinite(values).all():
        raise _broken(ctx, "values that are not finite")
    if not rank:
        return 1.0, None, values
    p, q = values[: rank * rows].reshape(rows, rank), values[rank * rows :].reshape(columns, rank)
    if np.abs(p).max() > _SLACK or np.abs(q).max() > _SLACK * rows:
        raise _broken(ctx, "factors that no matrix has")
    return scale, p, q


def _whole_number(payload: Payload, name: str, ctx: Context) -> int:
    value = payload_number(payload, name, ctx)
    if value != int(value) or not 0 <= value <= 2**53:
        raise _broken(ctx, f"{name} {value}")
    return int(value)


def _broken(ctx: Context, what: str) -> PayloadError:
    return PayloadError(f"{ctx}: the payload is broken: it claims {what}", key=ctx.key, rank=ctx.rank)
