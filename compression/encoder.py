"""Encodes one key's gradients chunk after chunk at one worker: checks, error feedback, fallbacks to raw.

    prepared = [encoder.prepare(gradient, params, round) for ...]   # all keys of a call: changes nothing
    for one in prepared:
        for chunk in one.encoder.encode(one):                       # chunk i+1 is encoded while i is on the wire
            send(chunk)

A chunk travels raw, as gradient + residual in the key's dtype, and its residual becomes zero, where the policy
says so (`none`, small keys), where the key is a single number (a loss, a counter: its sums are exact), during the
warm-up rounds, where the encoding would not be smaller than raw, and where it holds NaN or infinity under
`on_nonfinite='propagate'`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from typing import Any, cast

import msgspec
import numpy as np

from kvstore.compression.codec import (
    Array,
    Codec,
    CompressionType,
    Context,
    FusedFeedback,
    Key,
    OnNonFinite,
    Params,
    Payload,
    State,
)
from kvstore.compression.feedback import Residual, leave_unsent
from kvstore.compression.kernels import kernels_for, mover_for
from kvstore.compression.none import NoneCodec
from kvstore.compression.registry import feedback_enabled, make_codec
from kvstore.errors import ArrayError, CheckpointError, NonFiniteError

CHUNK_ELEMENTS = 262144
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_RAW = NoneCodec()


class EncodedChunk(msgspec.Struct, frozen=True, eq=False):
    """One chunk, ready to be sent: elements `offset .. offset + n` of the flattened key."""

    index: int
    offset: int
    n: int
    codec: str
    payload: Payload
    raw_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, header not counted."""
        return self.payload.nbytes


class Prepared(msgspec.Struct, frozen=True, eq=False):
    """A gradient that was found fit to be encoded, and how; made by `KeyEncoder.prepare`.

    flat: 1-d contiguous, the key's dtype; the caller's own memory where that was contiguous.
    codec: None where the whole key travels raw. fused: the codec, where it updates the residual itself.
    nonfinite: elements that are not finite (only with propagate).
    bound: no |gradient + residual| is larger.
    """

    encoder: KeyEncoder
    flat: Array
    codec: Codec | None
    fused: FusedFeedback | None
    feedback: bool
    round: int
    nonfinite: int
    bound: float


class KeyEncoder:
    """What one worker keeps for one key: the residual, and the state of the codec.

    A key of another shape gets a new encoder. Not for use by several threads at once.
    """

    def __init__(
        self,
        key: Key,
        n: int,
        dtype: np.dtype[Any],
        *,
        rank: int = 0,
        place: int = 0,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        self.key = key
        self.n = n
        self.dtype = np.dtype(dtype)
        self.rank = rank
        self.place = place  # in a list of arrays; each draws random numbers of its own
        self.chunk_elements = chunk_elements
        self.residual = Residual(n, chunk_elements)
        self.earlier = 0
        """What to add to a push's `round` for the warm-up: pushes of before a `load`. May be negative."""
        self._states: dict[int, State] = {}
        self._codec: Codec | None = None

    @cached_property
    def chunk_starts(self) -> range:
        """The offset of each chunk; an empty key has one empty chunk."""
        return range(0, max(self.n, 1), self.chunk_elements)

    def prepare(self, gradient: Array, params: Params, round: int = 1) -> Prepared:
        """Check a gradient against the key and the policy. Reads it once; changes nothing.

        Args:
            gradient: any shape, stride and order with the key's number of elements and dtype.
            params: from `CompressionPolicy.params_for`.
            round: number of this push of the key, the first being 1.

        Raises:
            ArrayError: another dtype or number of elements.
            NonFiniteError: NaN or infinity (also: a float64 or a sum with the residual too large for float32).
        """
        flat = self._flat(gradient)
        raw = params.type == CompressionType.NONE or self.earlier + round <= params.warmup_rounds or self.n <= 1
        codec = None if raw else self._codec_of(params)
        if codec is None:
            return Prepared(self, flat, None, None, False, round, 0, 0.0)
        feedback = feedback_enabled(codec)
        bound, count = self._largest(flat)
        if count and params.on_nonfinite is OnNonFinite.REFUSE:
            text = (
                f"key {self.key!r}, rank {self.rank}: {count} of {self.n} elements of the gradient are NaN or infinite "
                f"as float32; nothing was sent. Push finite values, or set on_nonfinite='propagate'"
            )
            raise NonFiniteError(text, key=self.key, rank=self.rank, count=count)
        fused = cast(FusedFeedback, codec) if feedback and _is_fused(type(codec)) else None
        return Prepared(self, flat, codec, fused, feedback, round, count, bound)

    def encode(self, prepared: Prepared, *, copy: bool = True) -> Iterator[EncodedChunk]:
        """Encode chunk after chunk, in order.

        Args:
            prepared: from `prepare` of this encoder, with no other `encode` in between.
            copy: False lets raw chunks share the gradient's memory: it must then stay as it is until they are sent.
        """
        codec = prepared.codec
        if codec is not None:
            self._take(codec, prepared.bound)
        starts = range(1) if codec is not None and codec.unit == "key" else self.chunk_starts
        length = self.n if len(starts) == 1 else self.chunk_elements
        for index, start in enumerate(starts):
            n = min(length, self.n - start)
            ctx = Context(
                key=self.key,
                n=n,
                chunk=index,
                offset=start,
                rank=self.rank + self.place,
                round=prepared.round,
                seed=0 if codec is None else codec.params.seed,
                dtype=self.dtype,
            )
            name, payload = self._encode_chunk(prepared, ctx, copy)
            yield EncodedChunk(index, start, n, name, payload, n * self.dtype.itemsize)
        if prepared.fused is not None:
            self.residual.bound = prepared.bound

    def reset(self) -> None:
        """Forget everything unsent and the codec's state: the value was overwritten."""
        self.residual.reset()
        self._states.clear()

    def state(self) -> dict[str, Array]:
        """What `save` keeps: names to host arrays; empty where nothing is unsent."""
        values = self.residual.export()
        kept = {} if values is None else {"residual": values}
        for start, state in self._states.items():
            kept |= {f"state/{start}/{name}": np.asarray(value) for name, value in state.items()}
        return kept

    def load_state(self, saved: Mapping[str, Array]) -> None:
        """Replace everything by what `state` returned.

        Raises:
            CheckpointError: it does not fit this key; nothing is changed.
        """
        values = saved.get("residual")
        if values is not None and (values.size != self.n or not np.isfinite(values).all()):
            text = f"key {self.key!r}: the saved residual has {values.size} elements, the key {self.n}, all finite"
            raise CheckpointError(text, key=self.key)
        self.reset()
        if values is not None:
            self.residual.load(values)
        for name, value in saved.items():
            if name.startswith("state/"):
                _, start, field = name.split("/", 2)
                self._states[int(start)] = {**self._states.get(int(start), {}), field: value}

    def _flat(self, gradient: Array) -> Array:
        if gradient.size != self.n or gradient.dtype.newbyteorder("=") != self.dtype:
            text = (
                f"key {self.key!r}: got {gradient.size} elements of {gradient.dtype}, "
                f"the key has {self.n} of {self.dtype}"
            )
            raise ArrayError(text, key=self.key, rank=self.rank)
        return gradient.reshape(-1).astype(self.dtype, order="C", copy=False)

    def _codec_of(self, params: Params) -> Codec:
        return self._codec if self._codec is not None and self._codec.params == params else make_codec(params)

    def _take(self, codec: Codec, bound: float) -> None:
        if self._codec is not None and self._codec.params.type != codec.params.type:
            self._states.clear()  # of the codec before; the residual is kept
        self._codec = codec
        self.residual.bound = max(self.residual.bound, bound)

    def _largest(self, flat: Array) -> tuple[float, int]:
        """A bound on |gradient + residual|, and how many of its elements are not finite as float32."""
        kernels = kernels_for(flat)
        bound = self.residual.bound
        step = self.n if self.dtype == np.float32 else self.chunk_elements  # others are converted piece by piece
        pieces = (kernels.max_abs(_float32(flat[start : start + step])) for start in range(0, self.n, step))
        largest = max(pieces, key=_nan_last)
        if largest + bound <= _FLOAT32_MAX:
            return largest + bound, 0
        # rare: count exactly, of the sum
        exact, count = 0.0, 0
        for start in self.chunk_starts:
            p = self._with_residual(flat, start, min(start + self.chunk_elements, self.n))
            finite = np.isfinite(p)
            count += int(p.size - finite.sum())
            exact = max(exact, float(np.abs(np.where(finite, p, 0)).max()))
        return exact, count

    def _with_residual(self, flat: Array, start: int, stop: int) -> Array:
        """gradient + residual of one chunk as a float32 array (the gradient's own memory if there is no residual)."""
        x = _float32(flat[start:stop])
        unsent = self.residual.pending(start, stop, flat)
        if unsent is None:
            return x
        with np.errstate(over="ignore", invalid="ignore"):
            return x + unsent

    def _encode_chunk(self, prepared: Prepared, ctx: Context, copy: bool) -> tuple[str, Payload]:
        codec, start, stop = prepared.codec, ctx.offset, ctx.offset + ctx.n
        if codec is None or self._chunk_is_raw(codec, prepared, start, stop):
            return self._raw(prepared, ctx, copy)
        x = _float32(prepared.flat[start:stop])
        if prepared.fused is not None:
            residual = self.residual.writable(start, stop, x)
            payload, state = prepared.fused.encode_feedback(x, residual, self._states.get(start), ctx)
        else:
            p = self._with_residual(prepared.flat, start, stop)
            payload, state = codec.encode(p, self._states.get(start), ctx)
            if payload.nbytes >= ctx.n * self.dtype.itemsize:
                return self._raw(prepared, ctx, copy)
            if prepared.feedback:
                residual = self.residual.writable(start, stop, x)
                leave_unsent(codec, p, payload, residual, ctx)
                self.residual.bound = max(self.residual.bound, kernels_for(x).max_abs(residual))
            else:
                self.residual.clear(start, stop)
        if state is not None:
            self._states[start] = state
        return codec.params.type, Payload(mover_for(x).to_host(payload.data), payload.meta)

    def _chunk_is_raw(self, codec: Codec, prepared: Prepared, start: int, stop: int) -> bool:
        n = stop - start
        if prepared.fused is not None and codec.max_bytes(n, self.dtype) >= n * self.dtype.itemsize:
            return True  # its size is known beforehand
        if not prepared.nonfinite:
            return False
        p = self._with_residual(prepared.flat, start, stop)
        return not math.isfinite(kernels_for(p).max_abs(p))

    def _raw(self, prepared: Prepared, ctx: Context, copy: bool) -> tuple[str, Payload]:
        """Send gradient + residual in the key's dtype; nothing stays unsent."""
        start, stop = ctx.offset, ctx.offset + ctx.n
        x = prepared.flat[start:stop]
        unsent = self.residual.pending(start, stop, x)
        if unsent is not None:
            wide = x if self.dtype == np.float64 else _float32(x)
            with np.errstate(over="ignore", invalid="ignore"):
                x = _saturated(wide + unsent, self.dtype)
            self.residual.clear(start, stop)
        elif copy:
            x = x.copy()
        payload, _ = _RAW.encode(mover_for(x).to_host(x), None, ctx)
        return _RAW.params.type, payload


@cache
def _is_fused(codec: type[Any]) -> bool:
    return issubclass(codec, FusedFeedback)


def _float32(x: Array) -> Array:
    if x.dtype == np.float32:
        return x
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def _saturated(x: Array, dtype: np.dtype[Any]) -> Array:
    """x in a dtype that may be narrower: a finite value stays finite."""
    import ml_dtypes  # only here: what it takes to import is not spent by others

    if dtype.itemsize < x.dtype.itemsize:
        finfo: Any = ml_dtypes.finfo
        largest = float(finfo(dtype).max)
        x = np.where(np.isfinite(x), x.clip(-largest, largest), x)
    return x.astype(dtype)


def _nan_last(value: float) -> float:
    return math.inf if value != value else value
