"""QSGD: each element becomes one of s levels of its bucket's norm by unbiased random rounding, then a short code.

Alistarh, Grubic, Li, Tomioka, Vojnovic: "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NIPS 2017, section 3 (operator, buckets, max norm: section 5) and appendix A (Elias codes). The operator is in
`qsgd_numpy`, the codes in `codings`.

With the l2 norm E|Q - v|^2 <= min(d / s^2, sqrt(d) / s) |v|^2 per bucket of d; with the max norm at most d / (4 s^2)
|v|^2. That can exceed 1, so error feedback diverges, unless the decoded values are divided by one plus that bound
(`scaled`).

Bytes: the buckets' norms as little-endian float32, then the codes of the buckets whose norm is not 0, bit after bit
(see `codings`). The payload's meta names levels, bucket size, coding and the exact number of bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np

from kvstore.compression.codec import (
    Array,
    CompressionType,
    Context,
    Params,
    Payload,
    State,
    parameter_error,
    payload_number,
)
from kvstore.compression.codings import (
    MOST_LEVELS,
    MOST_UNARY,
    BrokenCodeError,
    Coding,
    fixed_bits,
    least_bits,
    most_bits,
)
from kvstore.compression.kernels import family_for, kernels_for
from kvstore.compression.philox import dither_key
from kvstore.errors import PayloadError

_MOST_BUCKET = 2**31
_TINY = np.finfo(np.float32).smallest_subnormal


class Norm(StrEnum):
    """What levels are fractions of: the bucket's Euclidean norm (theory), or its largest element (practice)."""

    L2 = "l2"
    MAX = "max"


class CodingChoice(StrEnum):
    """How levels become bits; `auto` takes the shortest for each chunk, from exact lengths."""

    FIXED = "fixed"
    ELIAS_DENSE = "elias_dense"
    ELIAS_DENSE_NZ = "elias_dense_nz"
    ELIAS_SPARSE = "elias_sparse"
    UNARY = "unary"
    HUFFMAN = "huffman"
    AUTO = "auto"


class QsgdParams(Params, frozen=True, tag=CompressionType.QSGD.value):
    """levels: s, 7 if neither is given. bits: of the fixed coding, instead of levels: s = 2^(bits - 1) - 1.

    bucket_size: elements that share a norm. norm, coding: see there.
    scaled: divide by one plus the variance bound: biased, but fit for error feedback.
    """

    levels: Annotated[int, msgspec.Meta(ge=1, le=MOST_LEVELS)] | None = None
    bits: Annotated[int, msgspec.Meta(ge=2, le=16)] | None = None
    bucket_size: Annotated[int, msgspec.Meta(ge=1, le=_MOST_BUCKET)] = 512
    norm: Norm = Norm.MAX
    coding: CodingChoice = CodingChoice.AUTO
    scaled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.levels is not None and self.bits is not None:
            raise parameter_error("bits", self.bits, f"levels or bits, not both: levels is {self.levels}")
        if self.coding is CodingChoice.UNARY and self.s > MOST_UNARY:
            raise parameter_error("coding", "unary", f"another coding: unary takes at most {MOST_UNARY} levels")

    @property
    def s(self) -> int:
        """The number of levels."""
        if self.bits is not None:
            return (1 << (self.bits - 1)) - 1
        return 7 if self.levels is None else self.levels


class Stream(NamedTuple):
    """A payload taken apart: m levels up to s in buckets of d."""

    norms: Array
    data: Array
    coding: Coding
    bits: int
    m: int
    d: int
    s: int

    @property
    def direct(self) -> bool:
        """Whether every pattern of bits is a level, and a kernel decodes them as they are."""
        width = fixed_bits(self.s)
        whole = self.s == (1 << (width - 1)) - 1
        return self.coding == Coding.FIXED and whole and (width == 8 or (width == 4 and self.d % 2 == 0))


class Qsgd:
    """Random rounding to s levels per bucket, without bias; fixed-width, Elias or Huffman codes."""

    params_type: ClassVar[type[Params]] = QsgdParams
    unit: ClassVar[Literal["chunk", "key"]] = "chunk"
    unbiased: ClassVar[bool] = True
    contraction: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    feedback: ClassVar[bool] = False

    def __init__(self, params: QsgdParams | None = None) -> None:
        own = params or QsgdParams()
        self.params: Params = own
        self.s, self.d, self.l2, self.scaled = own.s, own.bucket_size, own.norm is Norm.L2, own.scaled
        self.coding = None if own.coding is CodingChoice.AUTO else Coding[own.coding.name]

    def omega(self, n: int) -> float:
        """The bound on the relative variance for a key of n elements."""
        d = max(min(self.d, n), 1)
        return min(d / self.s**2, math.sqrt(d) / self.s) if self.l2 else d / (4 * self.s**2)

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """Four bytes per bucket and the longest codewords; `auto` is never above the fixed coding."""
        coding = Coding.FIXED if self.coding is None else self.coding
        return 4 * -(-n // self.d) + -(-most_bits(coding, n, self.s) // 8)

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """Quantise and code one chunk; the random numbers are those of (seed, rank, key, round, chunk)."""
        kernels = family_for("qsgd", x)
        where = (x, self.d, self.s, self.l2, dither_key(ctx), ctx.chunk)
        coding = self.coding
        if coding == Coding.FIXED:
            norms, data, bits = kernels.quantise_fixed(*where)
        else:
            norms, levels = kernels.quantise(*where)
            codings = family_for("codings", levels)
            if coding is None:
                sizes, pairs = codings.counts(levels, self.s)
                coding = least_bits(sizes, pairs, lambda: codings.sparse_bits(levels, self.d, self.s), self.s)
            data, bits = codings.encode(coding, levels, self.d, self.s)
        if self.scaled:
            smaller = (norms / (1 + self.omega(ctx.n))).astype(np.float32)
            norms = np.where(norms > 0, np.maximum(smaller, _TINY), norms)  # 0 would say that there are no codes
        meta = {"levels": self.s, "bucket_size": self.d, "coding": int(coding), "bits": bits}
        return Payload(np.concatenate([norms.astype("<f4", copy=False).view(np.uint8), data]), meta), state

    def check(self, payload: Payload, ctx: Context) -> None:
        """Decode to levels and forget them: codes of varying length have no cheaper test. See `Codec.check`."""
        _levels(_parsed(payload, ctx), ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out += nu * (level / s); see `Codec.decode_add`."""
        self._decode(payload, out, ctx, add=True)

    def decode_into(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out = nu * (level / s)."""
        self._decode(payload, out, ctx, add=False)

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """Every payload has norms of its own: sums are those of decoded values."""
        return None

    def _decode(self, payload: Payload, out: Array, ctx: Context, *, add: bool) -> None:
        stream = _parsed(payload, ctx)
        levels = _levels(stream, ctx)
        kernels = family_for("qsgd", out)
        flags = out.flags
        own = out.dtype == np.float32 and bool(flags.c_contiguous) and getattr(flags, "aligned", True)
        target = out if own else kernels_for(out).to_device(np.zeros(ctx.n, np.float32), out)
        if levels is None:
            kernels.decode_fixed(stream.data, stream.norms, stream.d, fixed_bits(stream.s), target, add and own)
        else:
            kernels.dequantise(levels, stream.norms, stream.d, stream.s, target, add and own)
        if own:
            return
        if add:
            out += target.astype(out.dtype)
        else:
            out[...] = target


def _levels(stream: Stream, ctx: Context) -> Array | None:
    """The levels; None where a kernel decodes the bytes themselves."""
    if stream.direct:
        return None
    try:
        codings = family_for("codings", stream.data)
        return codings.decode(stream.coding, stream.data, stream.bits, stream.m, stream.d, stream.s)
    except BrokenCodeError as error:
        raise _broken(str(error), ctx) from None


def _parsed(payload: Payload, ctx: Context) -> Stream:
    """Take a payload apart; every number in it is checked before anything of its size is allocated."""
    s = _whole(payload, "levels", 1, MOST_LEVELS, ctx)
    d = _whole(payload, "bucket_size", 1, _MOST_BUCKET, ctx)
    coding = Coding(_whole(payload, "coding", 0, max(Coding), ctx))
    bits = _whole(payload, "bits", 0, 8 * ctx.limits.max_payload_bytes, ctx)
    if coding == Coding.UNARY and s > MOST_UNARY:
        raise _broken(f"unary codes have at most {MOST_UNARY} levels, not {s}", ctx)
    count = -(-ctx.n // d)
    data = payload.data
    if not isinstance(data, np.ndarray):
        data = kernels_for(data).to_host(data) if hasattr(data, "dtype") else np.frombuffer(data, np.uint8)
    expected = 4 * count + -(-bits // 8)
    if data.nbytes != expected:
        raise _broken(f"the payload has {data.nbytes} bytes, {count} norms and {bits} bits take {expected}", ctx)
    norms = data[: 4 * count].copy().view("<f4").astype(np.float32, copy=False)
    if not (norms >= 0).all() or not np.isfinite(norms).all():
        raise _broken("a norm is negative, infinite or NaN", ctx)
    d = min(d, max(ctx.n, 1))
    held = np.flatnonzero(norms)
    m = held.size * d
    if held.size and held[-1] == count - 1:
        m -= count * d - ctx.n  # the last bucket is shorter
    if coding == Coding.FIXED and bits != m * fixed_bits(s):
        raise _broken(f"{m} levels take {m * fixed_bits(s)} bits, not {bits}", ctx)
    return Stream(norms, data[4 * count :], coding, bits, m, d, s)


def _whole(payload: Payload, name: str, least: int, most: int, ctx: Context) -> int:
    value = payload_number(payload, name, ctx)
    if value != int(value) or not least <= value <= most:
        raise _broken(f"the payload's {name} is {value}, allowed is an integer from {least} to {most}", ctx)
    return int(value)


def _broken(text: str, ctx: Context) -> PayloadError:
    return PayloadError(f"{ctx}: {text}", key=ctx.key, rank=ctx.rank)
