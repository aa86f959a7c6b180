"""Encodes one key's gradients chunk after chunk at one worker: checks, error feedback, fallbacks to raw.

    prepared = [encoder.prepare(gradient, params, round) for ...]   # all keys of a call: changes nothing
    for one in prepared:
        for chunk in one.encoder.encode(one):                       # chunk i+1 is encoded while i is on the wire
            send(chunk)

A chunk travels raw, as gradient + residual in the key's dtype, and its residual becomes zero, where the policy
says so (`none`, small keys), during the warm-up rounds, where the encoding would not be smaller than raw, and
where it holds NaN or infinity under `on_nonfinite='propagate'`.

A codec of whole keys makes one part of all chunks. With `momentum` the gradient is replaced by u = m u + g first
(momentum correction, Lin et al. 2018, arXiv:1712.01887); u is kept here, so the optimizer needs none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, cast

import msgspec
import numpy as np

from kvstore.compression.casts import as_float32, on_host, saturated
from kvstore.compression.codec import (
    Array,
    Codec,
    CompressionType,
    Context,
    FusedFeedback,
    Key,
    MaskingMomentum,
    OnNonFinite,
    Params,
    Payload,
    SizedByShape,
    State,
    satisfies,
)
from kvstore.compression.feedback import Residual, leave_unsent
from kvstore.compression.kernels import kernels_for, mover_for
from kvstore.compression.none import NoneCodec
from kvstore.compression.registry import feedback_enabled, make_codec
from kvstore.errors import ArrayError, CheckpointError, NonFiniteError

CHUNK_ELEMENTS = 262144
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_RAW = NoneCodec()
_STATE = re.compile(r"state/[^/]+/[0-9]{1,18}/[^/]+")


class EncodedChunk(msgspec.Struct, frozen=True, eq=False):
    """One chunk, ready to be sent: elements `offset .. offset + n` of the flattened key."""

    index: int
    offset: int
    n: int
    codec: str
    payload: Payload
    raw_nbytes: int
    whole: bool = False
    """It is all chunks of a key that has several."""

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, header not counted."""
        return self.payload.nbytes


class Prepared(msgspec.Struct, frozen=True, eq=False):
    """A gradient that was found fit to be encoded, and how; made by `KeyEncoder.prepare`.

    flat: 1-d contiguous, the key's dtype; the caller's own memory where that was contiguous.
    codec: None where the whole key travels raw. fused: the codec, where it updates the residual itself.
    nonfinite: elements that are not finite (only with propagate).
    bound: no |gradient + residual| is larger. velocity_bound: nor any |momentum|.
    momentum: the factor m of the momentum correction. clip: what the gradient is multiplied by before it.
    """

    encoder: KeyEncoder
    flat: Array
    codec: Codec | None
    fused: FusedFeedback | None
    feedback: bool
    round: int
    nonfinite: int
    bound: float
    velocity_bound: float = 0.0
    momentum: float = 0.0
    clip: float = 1.0

    @property
    def whole_bytes(self) -> int:
        """The most bytes that a key encoded whole takes."""
        codec, encoder = self.codec, self.encoder
        if codec is None:
            return encoder.n * encoder.dtype.itemsize
        if satisfies(codec, SizedByShape):
            return cast(SizedByShape, codec).encoded_bytes(encoder.shape) or 0
        return min(codec.max_bytes(encoder.n, encoder.dtype), encoder.n * encoder.dtype.itemsize)

    @property
    def parts(self) -> int:
        """How many chunks `encode` makes."""
        whole = self.codec is not None and self.codec.unit == "key"
        return 1 if whole else len(self.encoder.chunk_starts)


class KeyEncoder:
    """What one worker keeps for one key: the residual, the momentum, and the state of the codec.

    A key of another shape gets a new encoder. Not for use by several threads at once.
    """

    def __init__(
        self,
        key: Key,
        n: int,
        dtype: np.dtype[Any],
        *,
        rank: int = 0,
        chunk_elements: int = CHUNK_ELEMENTS,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.key = key
        self.shape = (n,) if shape is None else shape
        self.n = n
        self.dtype = np.dtype(dtype)
        self.rank = rank
        self.chunk_elements = chunk_elements
        self.residual = Residual(n, chunk_elements)
        self.velocity = Residual(n, chunk_elements)
        self.earlier = 0
        """What to add to a push's `round` for the warm-up: pushes of before a `load`. May be negative."""
        self._states: dict[int, State] = {}
        self._states_of = ""  # the type of the codec that they belong to
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
        raw = params.type == CompressionType.NONE or self.earlier + round <= params.warmup_rounds or self.n == 0
        codec = None if raw else self._codec_of(params)
        if codec is not None and satisfies(codec, SizedByShape):
            codec = codec if self._pays(cast(SizedByShape, codec)) else None
        if codec is None and not (params.momentum and self.n):
            return Prepared(self, flat, None, None, False, round, 0, 0.0)
        clip = self._clip(codec, flat)
        bound, count = self._largest(flat, params.momentum)
        if count and params.on_nonfinite is OnNonFinite.REFUSE:
            text = (
                f"key {self.key!r}, rank {self.rank}: {count} of {self.n} elements of the gradient are NaN or infinite "
                f"as float32; nothing was sent. Push finite values, or set on_nonfinite='propagate'"
            )
            raise NonFiniteError(text, key=self.key, rank=self.rank, count=count)
        feedback = codec is not None and feedback_enabled(codec)
        fused = cast(FusedFeedback, codec) if feedback and satisfies(codec, FusedFeedback) else None
        if codec is not None and count and codec.unit == "key":
            codec = None
        speed = bound if params.momentum else 0.0
        return Prepared(self, flat, codec, fused, feedback, round, count, bound, speed, params.momentum, clip)

    def encode(self, prepared: Prepared, *, copy: bool = True) -> Iterator[EncodedChunk]:
        """Encode chunk after chunk, in order.

        Args:
            prepared: from `prepare` of this encoder, with no other `encode` in between.
            copy: False lets raw chunks share the gradient's memory: it must then stay as it is until they are sent.
        """
        codec = prepared.codec
        self._take(prepared)
        starts = self.chunk_starts[: prepared.parts]
        length = self.n if prepared.parts == 1 else self.chunk_elements
        for index, start in enumerate(starts):
            n = min(length, self.n - start)
            ctx = Context(
                key=self.key,
                n=n,
                chunk=index,
                offset=start,
                rank=self.rank,
                round=prepared.round,
                seed=0 if codec is None else codec.params.seed,
                dtype=self.dtype,
                shape=self.shape,
                earlier=self.earlier,
            )
            name, payload = self._encode_chunk(prepared, ctx, copy)
            yield EncodedChunk(index, start, n, name, payload, n * self.dtype.itemsize, n > self.chunk_elements)
        if prepared.fused is not None:
            self.residual.bound = prepared.bound

    def reset(self) -> None:
        """Forget everything unsent, the momentum and the codec's state: the value was overwritten."""
        self.residual.reset()
        self.velocity.reset()
        self._states.clear()

    def forget_codec(self) -> None:
        """Forget the codec's state; residual and momentum stay."""
        self._states.clear()

    def state(self) -> dict[str, Array]:
        """What `save` keeps: names to host arrays; empty where nothing is unsent."""
        parts = {"residual": self.residual.export(), "momentum": self.velocity.export()}
        kept = {name: values for name, values in parts.items() if values is not None}
        for start, state in self._states.items():
            kept |= {f"state/{self._states_of}/{start}/{name}": on_host(value) for name, value in state.items()}
        return kept

    def load_state(self, saved: Mapping[str, Array]) -> None:
        """Replace everything by what `state` returned.

        Raises:
            CheckpointError: it does not fit this key; nothing is changed.
        """
        self.check_state(saved)
        self.reset()
        for name, held in (("residual", self.residual), ("momentum", self.velocity)):
            if name in saved:
                held.load(saved[name])
        for name, value in saved.items():
            if name.startswith("state/"):
                _, self._states_of, start, field = name.split("/", 3)
                self._states[int(start)] = {**self._states.get(int(start), {}), field: np.array(value)}

    def check_state(self, saved: Mapping[str, Array]) -> None:
        """Raise CheckpointError unless `load_state` can take this."""
        for name, values in saved.items():
            whole = name in ("residual", "momentum")
            if whole and (values.size != self.n or not np.isfinite(values).all()):
                text = f"key {self.key!r}: the saved {name} has {values.size} elements, the key {self.n}, all finite"
                raise CheckpointError(text, key=self.key)
            if not whole and not _STATE.fullmatch(name):
                raise CheckpointError(f"key {self.key!r}: unknown part {name!r} of a codec's state", key=self.key)

    def _flat(self, gradient: Array) -> Array:
        if gradient.size != self.n or gradient.dtype.newbyteorder("=") != self.dtype:
            text = (
                f"key {self.key!r}: got {gradient.size} elements of {gradient.dtype}, "
                f"the key has {self.n} of {self.dtype}"
            )
            raise ArrayError(text, key=self.key, rank=self.rank)
        return gradient.reshape(-1).astype(self.dtype, order="C", copy=False)

    def _pays(self, codec: SizedByShape) -> bool:
        size = codec.encoded_bytes(self.shape)
        return size is not None and size < self.n * self.dtype.itemsize

    def _codec_of(self, params: Params) -> Codec:
        return self._codec if self._codec is not None and self._codec.params == params else make_codec(params)

    def _take(self, prepared: Prepared) -> None:
        """Nothing is left to refuse this push: the codec is in use from now on."""
        codec = prepared.codec
        if codec is None or codec.params.type != self._states_of:
            self._states.clear()  # of the codec before; residual and momentum are kept
        if codec is not None:
            self._states_of = codec.params.type
            self._codec = codec
            self.residual.bound = max(self.residual.bound, prepared.bound)
        if prepared.momentum:
            self.velocity.bound = prepared.velocity_bound
        else:
            self.velocity.reset()

    def _clip(self, codec: Codec | None, flat: Array) -> float:
        if codec is None or not satisfies(codec, MaskingMomentum):
            return 1.0
        squares = sum(float(np.square(flat[start : start + self.chunk_elements], dtype=np.float64).sum())
                      for start in self.chunk_starts)  # fmt: skip
        return cast(MaskingMomentum, codec).clipped(math.sqrt(squares)) if math.isfinite(squares) else 1.0

    def _largest(self, flat: Array, momentum: float) -> tuple[float, int]:
        """A bound on |momentum * u + gradient + residual|, and how many of its elements are not finite as float32."""
        kernels = kernels_for(flat)
        bound = self.residual.bound + momentum * self.velocity.bound
        step = self.n if self.dtype == np.float32 else self.chunk_elements  # others are converted piece by piece
        pieces = (kernels.max_abs(as_float32(flat[start : start + step])) for start in range(0, self.n, step))
        largest = max(pieces, key=_nan_last)
        if largest + bound <= _FLOAT32_MAX:
            return largest + bound, 0
        # rare: count exactly, of the sum
        exact, count = 0.0, 0
        for start in self.chunk_starts:
            stop = min(start + self.chunk_elements, self.n)
            p = self._with_residual(self._with_momentum(flat, start, stop, momentum), start, stop)
            finite = np.isfinite(p)
            count += int(p.size - finite.sum())
            exact = max(exact, float(np.abs(np.where(finite, p, 0)).max()))
        return exact, count

    def _with_momentum(self, flat: Array, start: int, stop: int, momentum: float) -> Array:
        """momentum * u + gradient of one chunk as a float32 array; u is not changed."""
        x = as_float32(flat[start:stop])
        kept = self.velocity.pending(start, stop, flat) if momentum else None
        with np.errstate(over="ignore", invalid="ignore"):
            return x if kept is None else kept * np.float32(momentum) + x

    def _moved(self, prepared: Prepared, start: int, stop: int) -> Array:
        """u = momentum * u + clip * gradient of one chunk: what is to be sent in place of the gradient."""
        if not prepared.momentum:
            return as_float32(prepared.flat[start:stop])
        x = as_float32(prepared.flat[start:stop])
        u = self.velocity.writable(start, stop, x)
        u *= np.float32(prepared.momentum)
        u += x if prepared.clip == 1 else x * np.float32(prepared.clip)
        return u

    def _with_residual(self, x: Array, start: int, stop: int) -> Array:
        """x + residual of one chunk (x's own memory if there is no residual)."""
        unsent = self.residual.pending(start, stop, x)
        if unsent is None:
            return x
        with np.errstate(over="ignore", invalid="ignore"):
            return x + unsent

    def _encode_chunk(self, prepared: Prepared, ctx: Context, copy: bool) -> tuple[str, Payload]:
        codec, start, stop = prepared.codec, ctx.offset, ctx.offset + ctx.n
        if codec is None or self._chunk_is_raw(codec, prepared, start, stop):
            return self._raw(prepared, ctx, copy)
        x = self._moved(prepared, start, stop)
        if prepared.fused is not None:
            residual = self.residual.writable(start, stop, x)
            payload, state = prepared.fused.encode_feedback(x, residual, self._states.get(start), ctx)
        else:
            p = self._with_residual(x, start, stop)
            payload, state = codec.encode(p, self._states.get(start), ctx)
            if payload.nbytes >= ctx.n * self.dtype.itemsize:
                return self._as_it_is(x if prepared.momentum else prepared.flat[start:stop], ctx, copy=True)
            if prepared.feedback:
                residual = self.residual.writable(start, stop, x)
                sent = leave_unsent(codec, p, payload, residual, ctx)
                self.residual.bound = max(self.residual.bound, kernels_for(x).max_abs(residual))
                if prepared.momentum and satisfies(codec, MaskingMomentum):
                    x[sent != 0] = 0
            else:
                self.residual.clear(start, stop)
        if state is not None:
            self._states[start] = state
        return codec.params.type, Payload(mover_for(x).to_host(payload.data), payload.meta)

    def _chunk_is_raw(self, codec: Codec, prepared: Prepared, start: int, stop: int) -> bool:
        n, beforehand = stop - start, prepared.fused is not None or codec.accumulates
        if beforehand and codec.max_bytes(n, self.dtype) >= n * self.dtype.itemsize:
            return True
        if not prepared.nonfinite:
            return False
        return not self._finite(prepared, start, stop)

    def _finite(self, prepared: Prepared, start: int, stop: int) -> bool:
        x = self._with_momentum(prepared.flat, start, stop, prepared.momentum)
        p = self._with_residual(x, start, stop)
        return math.isfinite(kernels_for(p).max_abs(p))

    def _raw(self, prepared: Prepared, ctx: Context, copy: bool) -> tuple[str, Payload]:
        """Send the gradient (with momentum, unless that is not finite) and the residual raw."""
        start, stop = ctx.offset, ctx.offset + ctx.n
        if prepared.momentum and ctx.n and (not prepared.nonfinite or self._finite(prepared, start, stop)):
            return self._as_it_is(self._moved(prepared, start, stop), ctx, copy=True)
        return self._as_it_is(prepared.flat[start:stop], ctx, copy)

    def _as_it_is(self, x: Array, ctx: Context, copy: bool) -> tuple[str, Payload]:
        """Send x + residual in the key's dtype; nothing stays unsent."""
        start, stop = ctx.offset, ctx.offset + ctx.n
        unsent = self.residual.pending(start, stop, x)
        if unsent is not None:
            wide = x if self.dtype == np.float64 else as_float32(x)
            with np.errstate(over="ignore", invalid="ignore"):
                x = saturated(wide + unsent, self.dtype)
            self.residual.clear(start, stop)
        elif x.dtype != self.dtype:
            x = saturated(x, self.dtype)
        elif copy:
            x = x.copy()
        payload, _ = _RAW.encode(mover_for(x).to_host(x), None, ctx)
        return _RAW.params.type, payload


def _nan_last(value: float) -> float:
    return math.inf if value != value else value
