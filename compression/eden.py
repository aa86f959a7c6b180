"""EDEN and DRIVE: a chunk is rotated at random, so that its elements are nearly normal, and quantised to few bits.

EDEN (Vargaftik et al. 2022, arXiv:2108.08842): y = H D x (D random signs, H a Hadamard matrix), z = y / |x| is rounded
to the centroids c that are best for N(0, 1) (Lloyd, Max), and the decoder returns s H D c with s = |x|^2 / <y, c>,
which makes the estimate unbiased over random rotations; over those by Hadamard matrices nearly so: vectors that a few
elements dominate keep a bias of some percent. DRIVE (Vargaftik et al. 2021, arXiv:2105.08339) is its form for one bit,
where c is the sign.

Blocks: `block` elements each; the last one is padded with zeros to a power of two. So n elements take exactly
(n // block) * block + 2 ** ceil(log2(n % block)) codes. Bytes: a float32 scale for each block, then the codes' lowest
bits of all elements, eight to a byte, first element highest, then the next higher bits, and so on. Signs are bit
e % 32 of word e // 32 of the Philox stream (`philox`, purpose rotation) whose key is in the payload; each worker and
round has its own, so errors average out over workers.

Everything but the rotation is array functions that NumPy and CuPy share; the rotation also has a numba kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    parameter_error,
    payload_bytes,
    payload_number,
)
from kvstore.compression.hadamard import rotate, tree_sum
from kvstore.compression.kernels import mover_for
from kvstore.compression.philox import Purpose, stream_key, words
from kvstore.errors import PayloadError

_LARGEST = float(np.finfo(np.float32).max)
_HALVES = {
    1: [0.7978846],
    2: [0.45278, 1.5104176],
    3: [0.2450942, 0.7560053, 1.3439093, 2.1519457],
    4: [0.128395, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896],
}
"""Centroids above zero by number of bits (Max 1960, for N(0, 1))."""
CENTROIDS = {bits: np.array([-c for c in reversed(half)] + half, np.float32) for bits, half in _HALVES.items()}


class DriveParams(Params, frozen=True, tag=CompressionType.DRIVE.value):
    """block: elements rotated together, a power of two; larger ones are closer to normal and slower."""

    block: Annotated[int, msgspec.Meta(ge=8, le=65536)] = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block & (self.block - 1):
            raise parameter_error("block", self.block, "a power of two from 8 to 65536")


class EdenParams(DriveParams, frozen=True, tag=CompressionType.EDEN.value):
    """bits: of each element. block: elements rotated together, a power of two."""

    bits: Annotated[int, msgspec.Meta(ge=1, le=4)] = 2


class Eden:
    """Random rotation, then the best few levels for a normal distribution; unbiased."""

    params_type: ClassVar[type[Params]] = EdenParams
    unit: ClassVar[Literal["chunk", "key"]] = "chunk"
    unbiased: ClassVar[bool] = True
    contraction: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    feedback: ClassVar[bool] = False

    def __init__(self, params: DriveParams | None = None) -> None:
        own = params or EdenParams()
        self.params: Params = own
        self.block = own.block
        self.bits = own.bits if isinstance(own, EdenParams) else 1

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """Always exactly this."""
        return _size(n, self.block, self.bits)

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """Scales, then codes by planes of bits."""
        stream = stream_key(ctx.seed, Purpose.ROTATION, ctx.rank, ctx.key, ctx.round)
        signs = _signs(stream, ctx, self.block, x)
        scales, codes = [], []
        for part, padded, width in _groups(ctx.n, self.block):
            rows = np.zeros_like(x, shape=(padded.stop - padded.start,))
            rows[: part.stop - part.start] = x[part]
            scale, code = self._quantised(rows.reshape(-1, width), signs[padded].reshape(-1, width))
            scales.append(scale)
            codes.append(code.reshape(-1))
        meta = {"stream": stream, "bits": self.bits, "block": self.block}
        if not codes:
            return Payload(np.zeros_like(x, np.uint8, shape=(0,)), meta), state
        joined = np.concatenate(codes)
        planes = [np.packbits((joined >> bit) & 1) for bit in range(self.bits)]
        head = np.concatenate(scales).astype("<f4", copy=False).view(np.uint8)
        return Payload(np.concatenate([head, *planes]), meta), state

    def _quantised(self, rows: Array, signs: Array) -> tuple[Array, Array]:
        """Scale and codes (uint8) of each row."""
        centroids = CENTROIDS[self.bits]
        top = np.abs(rows).max(axis=1, keepdims=True)
        rows = rows / np.where(top > 0, top, 1)  # so that no square can overflow
        squares = tree_sum(np.square(rows, dtype=np.float64))
        y = rotate(rows * signs)
        z = y / np.sqrt(np.where(squares > 0, squares, 1)).astype(np.float32)
        codes = np.zeros_like(z, np.uint8)
        for bound in (centroids[1:] + centroids[:-1]) / 2:
            codes += z >= bound
        chosen = mover_for(rows).to_device(centroids, rows)[codes]
        products = tree_sum(np.multiply(y, chosen, dtype=np.float64))
        scale = top * (squares / np.where(products > 0, products, 1))
        return np.clip(scale, 0, _LARGEST).astype(np.float32).reshape(-1), codes

    def check(self, payload: Payload, ctx: Context) -> None:
        """The byte count and the scales; any codes decode. See `Codec.check`."""
        _parts(payload, ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Rotate the centroids back, and scale; see `Codec.decode_add`."""
        stream, bits, block, scales, planes = _parts(payload, ctx)
        signs = _signs(stream, ctx, block, out)
        planes = mover_for(out).to_device(planes, out)
        scales = mover_for(out).to_device(scales, out)
        codes = np.unpackbits(planes[0]).astype(np.intp)
        for bit in range(1, bits):
            codes += np.unpackbits(planes[bit]).astype(np.intp) << bit
        centroids = mover_for(out).to_device(CENTROIDS[bits], out)
        first = 0
        for part, padded, width in _groups(ctx.n, block):
            rows = rotate(centroids[codes[padded]].reshape(-1, width)) * signs[padded].reshape(-1, width)
            scale = scales[first : first + rows.shape[0], None]
            first += rows.shape[0]
            with np.errstate(over="ignore"):
                values = (rows * scale).reshape(-1)[: part.stop - part.start].clip(-_LARGEST, _LARGEST)
                out[part] += values.astype(out.dtype, copy=False)

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """Each has a rotation of its own; servers decode them."""
        return None


class Drive(Eden):
    """Random rotation, then the sign alone; unbiased, one bit an element."""

    params_type: ClassVar[type[Params]] = DriveParams

    def __init__(self, params: DriveParams | None = None) -> None:
        super().__init__(params or DriveParams())


def _groups(n: int, block: int) -> Iterator[tuple[slice, slice, int]]:
    """Elements, their places among the padded ones, and the width of a block: of all full blocks, then of the rest."""
    full = n // block * block
    if full:
        yield slice(0, full), slice(0, full), block
    if n > full:
        width = 1 << (n - full - 1).bit_length()
        yield slice(full, n), slice(full, full + width), width


def _counts(n: int, block: int) -> tuple[int, int]:
    """Padded elements, and blocks."""
    groups = list(_groups(n, block))
    return sum(p.stop - p.start for _, p, _ in groups), sum((p.stop - p.start) // width for _, p, width in groups)


def _size(n: int, block: int, bits: int) -> int:
    padded, blocks = _counts(n, block)
    return 4 * blocks + bits * -(-padded // 8)


def _signs(stream: int, ctx: Context, block: int, like: Array) -> Array:
    """+1 or -1 for each padded element, float32, where `like` lies."""
    padded, _ = _counts(ctx.n, block)
    drawn = words(stream, ctx.chunk, -(-padded // 32)).astype("<u4", copy=False).view(np.uint8)
    bits = np.unpackbits(drawn, bitorder="little")[:padded]
    return mover_for(like).to_device(np.float32(1) - np.float32(2) * bits.astype(np.float32), like)


def _parts(payload: Payload, ctx: Context) -> tuple[int, int, int, Array, Array]:
    """Stream, bits, block, the scales, and the codes' planes (bits, bytes); the latter two in host memory."""
    stream = payload.meta.get("stream")
    bits, block = (int(payload_number(payload, name, ctx)) for name in ("bits", "block"))
    powers = 8 <= block <= 65536 and not block & (block - 1)
    if not isinstance(stream, int) or isinstance(stream, bool) or not 0 <= stream < 2**64:
        raise _broken(ctx, f"stream {stream!r}")
    if not powers or bits not in CENTROIDS:
        raise _broken(ctx, f"{bits} bits and blocks of {block}")
    padded, blocks = _counts(ctx.n, block)
    data = mover_for(payload.data).to_host(payload_bytes(payload, _size(ctx.n, block, bits), ctx))
    scales = data[: 4 * blocks].view("<f4")
    if not (np.isfinite(scales).all() and (scales >= 0).all()):
        raise _broken(ctx, "a scale that is not finite, or negative")
    return stream, bits, block, scales, data[4 * blocks :].reshape(bits, -(-padded // 8))


def _broken(ctx: Context, what: str) -> PayloadError:
    return PayloadError(f"{ctx}: the payload is broken: it claims {what}", key=ctx.key, rank=ctx.rank)
