"""Top-sum: the fewest largest elements whose sum reaches the norm, each sent as the norm with its sign.

The deterministic quantiser of QSGD (Alistarh et al., NIPS 2017, appendix on quantised gradient descent): I(v) is the
smallest set of largest |v_i| with sum at least |v|_2, Q(v)_i = |v|_2 sgn(v_i) on I, else 0. Then v.Q >= |v|^2,
|I| <= ceil(sqrt n) and |Q|^2 = |I| |v|^2. Of equal elements the first are taken.

It is biased and no contraction: for full gradients of one worker. The sum of several workers' Q is not the Q of their
sum, so a store of several workers refuses it (`one_worker`).

Bytes: the norm as little-endian float32; then for each element of I, in order, the omega code of its distance from the
one before (the first is counted from index -1) and its sign (1 is negative). The meta names their count and the exact
number of bits. At most ceil(sqrt n) codewords: they are written by the plain reference; there is no CUDA twin, as one
sort over the key decides everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.codec import Array, CompressionType, Context, Params, Payload, State, payload_number
from kvstore.compression.codings import BrokenCodeError, omega, omega_length
from kvstore.compression.codings_numpy import Reader
from kvstore.compression.kernels import mover_for
from kvstore.errors import PayloadError

_LARGEST = float(np.finfo(np.float32).max)


class TopsumParams(Params, frozen=True, tag=CompressionType.TOPSUM.value):
    """Top-sum has no parameters of its own."""


class Topsum:
    """The largest elements that together reach the norm; deterministic, for the full gradients of one worker."""

    params_type: ClassVar[type[Params]] = TopsumParams
    unit: ClassVar[Literal["chunk", "key"]] = "key"
    unbiased: ClassVar[bool] = False
    contraction: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    feedback: ClassVar[bool] = False
    one_worker: ClassVar[bool] = True

    def __init__(self, params: TopsumParams | None = None) -> None:
        self.params: Params = params or TopsumParams()

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """ceil(sqrt n) signs and distances; distances that sum to n are longest in code where they are equal."""
        most = most_held(n)
        return 4 + -(-most * (omega_length(2 * -(-n // max(most, 1)) + 1) + 3) // 8)

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """Select, then write distances and signs."""
        v = mover_for(x).to_host(x)
        places, norm = select(v)
        gaps, negative = np.diff(places, prepend=-1).tolist(), (v[places] < 0).tolist()
        text = "".join(omega(gap) + ("1" if sign else "0") for gap, sign in zip(gaps, negative, strict=True))
        data = np.packbits(np.frombuffer(text.encode(), np.uint8) - 48)
        meta = {"count": places.size, "bits": len(text)}
        return Payload(np.concatenate([np.array([norm], "<f4").view(np.uint8), data]), meta), state

    def check(self, payload: Payload, ctx: Context) -> None:
        """Read all of it; see `Codec.check`."""
        _read(payload, ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out[i] += norm * sign for the elements sent."""
        places, values = _read(payload, ctx)
        added = np.zeros(ctx.n, np.float32)
        added[places] = values
        out += mover_for(out).to_device(added, out).astype(out.dtype)

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """Sums are those of decoded values."""
        return None


def most_held(n: int) -> int:
    """ceil(sqrt n): no more elements are ever sent."""
    return math.isqrt(n - 1) + 1 if n else 0


def select(v: NDArray[np.float32]) -> tuple[NDArray[np.int64], float]:
    """The indices of I(v) in increasing order, and the norm; nothing for a vector of zeros."""
    size = np.abs(v.astype(np.float64))
    norm = math.sqrt(float(size @ size))
    if norm == 0:
        return np.zeros(0, np.int64), 0.0
    most = most_held(v.size)
    least = np.partition(size, v.size - most)[v.size - most]
    candidates = np.flatnonzero(size >= least)
    order = candidates[np.argsort(-size[candidates], kind="stable")][:most]
    # sums in another order than the norm's: without the slack one element too many might be taken
    held = int(np.searchsorted(np.cumsum(size[order]), norm * (1 - 1e-15))) + 1
    return np.sort(order[:held]), min(norm, _LARGEST)


def _read(payload: Payload, ctx: Context) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    count = _whole(payload, "count", most_held(ctx.n), ctx)
    bits = _whole(payload, "bits", 64 * count, ctx)
    data = payload.data
    if not isinstance(data, np.ndarray):
        data = mover_for(data).to_host(data) if hasattr(data, "dtype") else np.frombuffer(data, np.uint8)
    if data.size != 4 + -(-bits // 8):
        raise _broken(f"the payload has {data.size} bytes, a norm and {bits} bits take {4 + -(-bits // 8)}", ctx)
    norm = data[:4].copy().view("<f4").astype(np.float32)[0]
    if not 0 <= norm <= _LARGEST:
        raise _broken(f"the norm is {norm}", ctx)
    reader, places, signs, place = Reader(data[4:], bits), [], [], -1
    try:
        for _ in range(count):
            place += reader.omega(ctx.n - 1 - place)
            places.append(place)
            signs.append(reader.take(1))
        reader.end()
    except BrokenCodeError as error:
        raise _broken(str(error), ctx) from None
    return np.array(places, np.int64), np.where(np.array(signs, bool), -norm, norm)


def _whole(payload: Payload, name: str, most: int, ctx: Context) -> int:
    value = payload_number(payload, name, ctx)
    if value != int(value) or not 0 <= value <= most:
        raise _broken(f"the payload's {name} is {value}, allowed is an integer from 0 to {most}", ctx)
    return int(value)


def _broken(text: str, ctx: Context) -> PayloadError:
    return PayloadError(f"{ctx}: {text}", key=ctx.key, rank=ctx.rank)
