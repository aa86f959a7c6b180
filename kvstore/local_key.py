"""What a local store keeps of one key, and what a push does to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.arrays import Template, like, write_into
from kvstore.compression.codec import Accumulating, Context
from kvstore.compression.encoder import EncodedChunk, KeyEncoder, Prepared
from kvstore.compression.policy import RAW, CompressionPolicy
from kvstore.compression.registry import codec_named
from kvstore.dtypes import NDArray, accumulator, is_float
from kvstore.errors import ServerError
from kvstore.messages import Key
from kvstore.optimizer import Optimizer
from kvstore.reduction import current, flattened, sum_in_order, to_host
from kvstore.store import Updater


@dataclass
class Counters:
    """Since `create`: calls, bytes, seconds. Names as in `KVStore.stats`."""

    pushes: int = 0
    pulls: int = 0
    raw_bytes: int = 0
    sent_bytes: int = 0
    pulled_bytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    wait_seconds: float = 0.0


@dataclass(frozen=True)
class Kept:
    """The sum (n,) of all increments, and from how many positions of the list of arrays they came."""

    total: Any
    positions: int


@dataclass(frozen=True)
class Fit:
    """The arrays of one push, found fit. `encoded`: how each is to be encoded; empty: they are summed as they are."""

    flats: Sequence[Any]
    encoded: Sequence[Prepared]


class LocalKey:
    """Value, optimizer state, residuals and counters of one key."""

    template: Template
    master: Any
    """(n,), NumPy, or CuPy where a sum was left on a device; float32 for half-precision keys."""
    state: dict[str, NDArray] | None
    """The optimizer's; None before its first update."""
    step: int
    encoders: list[KeyEncoder]
    """One per position in the list of arrays; they hold the residuals."""
    kept: Kept | None
    """The sum of all increments, under a codec that accumulates."""

    def __init__(self, key: Key, value: NDArray, template: Template) -> None:
        """`value`: of `template`'s shape; copied."""
        self.key = key
        self.counters = Counters()
        self.overwrite(value, template)

    def overwrite(self, value: NDArray, template: Template) -> None:
        """Set another value, of another shape or type if need be; residuals and optimizer state are reset."""
        self.template = template
        self.master = value.reshape(-1).astype(accumulator(template.dtype))
        self.encoders = []
        self.kept = None
        self.forget_updates()

    @property
    def n(self) -> int:
        """Number of elements."""
        return int(self.master.size)

    def forget_updates(self) -> None:
        """Let the optimizer start afresh."""
        self.state, self.step = None, 0

    def value(self) -> Any:
        """The value (n,) in the key's own type, where the master lies; may overflow half precision to inf."""
        with current(self.master), np.errstate(over="ignore"):
            return self.master.astype(self.template.dtype, copy=False)

    def read(self, outs: Sequence[Any]) -> Any:
        """Write the value into every out; without any, return a new array like the one given to `init`."""
        self.counters.pulls += 1
        value = self.value()
        self.counters.pulled_bytes += int(value.nbytes)
        for out in outs:
            write_into(out, value, self.key)
        return None if outs else like(self.template, value)

    # --- a push: `fit` checks and changes nothing, `reduce` sums, the other two set the value ---------------------

    def fit(self, arrays: Sequence[Any], policy: CompressionPolicy | None, on_device: bool) -> Fit:
        """Find out whether arrays of the right shape and type can be pushed, and how.

        Raises:
            NonFiniteError: one of them is to be compressed and holds NaN or infinity.
            ParameterError: the policy names a codec for a key that cannot be compressed.
        """
        dtype = self.template.dtype
        flats = [flattened(array, self.key, dtype, on_device) for array in arrays]
        params = RAW if policy is None else policy.params_for(self.key, self.n, dtype)
        raw = params.type == RAW.type and not params.momentum
        if not is_float(dtype) or (raw and not any(one.residual for one in self.encoders)):
            return Fit(flats, ())
        while len(self.encoders) < len(flats):
            self.encoders.append(KeyEncoder(self.key, self.n, dtype, shape=self.template.shape))
        turn = self.counters.pushes + 1
        encoded = []
        for encoder, flat in zip(self.encoders, flats, strict=False):
            with current(flat):
                encoded.append(encoder.prepare(flat, params, turn))
        return Fit(flats, encoded)

    def reduce(self, fit: Fit) -> Any:
        """Return the sum (n,) of a push in the accumulator's type, in list order; every array is encoded if one is."""
        counters = self.counters
        counters.pushes += 1
        counters.raw_bytes += sum(int(flat.nbytes) for flat in fit.flats)
        if not fit.encoded:
            self._forget_increments()
            counters.sent_bytes += sum(int(flat.nbytes) for flat in fit.flats)
            return sum_in_order(fit.flats, self.template.dtype)
        with current(fit.flats[0]):
            return self._sum_encoded(fit, fit.flats[0])

    def replace(self, total: Any) -> None:
        """value <- sum; `total` is ours from now on."""
        self.master = total

    def update(self, optimizer: Optimizer[Any], total: Any) -> None:
        """value <- update(value, sum). Rules compute on the host. If one fails, the value is as it was."""
        value, gradient = to_host(self.master), to_host(total)
        if self.state is None:
            self.state = optimizer.create_state(self.n, value.dtype)
        new = optimizer.update(self.key, self.template.shape, 0, value, gradient, self.state, self.step + 1)
        if not isinstance(new, np.ndarray) or new.shape != value.shape or new.dtype != value.dtype:
            raise ServerError(
                f"the optimizer's rule returned something else than an array {value.shape} of {value.dtype} for key "
                f"{self.key!r}; the value is unchanged",
                key=self.key,
            )
        self.master = new
        self.step += 1

    def update_by(self, updater: Updater, total: Any) -> None:
        """Let a Python function change the value. If it fails, the value is as it was."""
        shape = self.template.shape
        value = to_host(self.master).copy()
        updater(self.key, to_host(total).reshape(shape), value.reshape(shape))
        self.master = value.copy()  # the function may have kept its argument

    def _forget_increments(self) -> None:
        if self.kept is not None:
            self.kept = None
            for encoder in self.encoders:
                encoder.forget_codec()

    def _sum_encoded(self, fit: Fit, first: Any) -> Any:
        codec = fit.encoded[0].codec
        accumulates = codec is not None and codec.accumulates
        if not accumulates or (self.kept is not None and self.kept.positions != len(fit.flats)):
            self._forget_increments()
        total = np.zeros_like(first, accumulator(self.template.dtype), shape=(self.n,))
        raw: list[slice] = []
        sources = [one.encoder.encode(one, copy=False) for one in fit.encoded]
        for _ in range(fit.encoded[0].parts):
            start = time.perf_counter()
            chunks = []
            for source, flat in zip(sources, fit.flats, strict=True):
                with current(flat):
                    chunks.append(next(source))
            middle = time.perf_counter()
            self._add(chunks, total)
            self.counters.encode_seconds += middle - start
            self.counters.decode_seconds += time.perf_counter() - middle
            self.counters.sent_bytes += sum(chunk.nbytes for chunk in chunks)
            if not codec_named(chunks[0].codec).accumulates:
                raw.append(slice(chunks[0].offset, chunks[0].offset + chunks[0].n))
        for source in sources:
            next(source, None)  # lets each encoder finish its account of the residual
        return self._accumulated(fit, total, raw) if accumulates else total

    def _accumulated(self, fit: Fit, increments: Any, raw: Sequence[slice]) -> Any:
        """The sum with these increments; chunks that went `raw` are no increments and are not kept."""
        kept = increments if self.kept is None else self.kept.total + increments
        total = kept.copy()
        for span in raw:
            total[span] = increments[span]
            kept[span] = 0
        self.kept = Kept(kept, len(fit.flats))
        return total

    def _add(self, chunks: Sequence[EncodedChunk], total: Any) -> None:
        """Add one chunk of every array: by counting where the codec can, else one after another."""
        out = total[chunks[0].offset : chunks[0].offset + chunks[0].n]
        contexts = [
            Context(
                key=self.key, n=chunk.n, chunk=chunk.index, offset=chunk.offset, round=self.counters.pushes,
                dtype=self.template.dtype,
            )
            for chunk in chunks
        ]  # fmt: skip
        codec = codec_named(chunks[0].codec)
        if isinstance(codec, Accumulating) and len({chunk.codec for chunk in chunks}) == 1:
            codec.accumulate([chunk.payload for chunk in chunks], out, contexts)
            return
        for chunk, context in zip(chunks, contexts, strict=True):
            codec_named(chunk.codec).decode_add(chunk.payload, out, context)
