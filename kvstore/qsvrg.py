"""QSVRG: variance-reduced SGD whose messages are quantised; linear convergence on smooth, strongly convex sums.

Alistarh, Grubic, Li, Tomioka, Vojnovic: "QSGD", NIPS 2017, section 3.3 and the appendix on QSVRG; SVRG is Johnson and
Zhang 2013. Worker i holds m_i of the m samples. Epoch p starts from the snapshot y: H = the gradient of f at y; x = y;
then for t = 1 .. T each worker draws a sample j, sends Q(w_i (grad f_j(x) - grad f_j(y)) + H), and x loses lr times the
mean; the next snapshot is the mean of x_1 .. x_T.

How H is sent (`snapshot`):

- exact: raw, one message per epoch.
- diff: d_i = Q(grad h_i(y) - a_i) against a memory a_i of worker i, H = sum of a_i + d_i, then a_i += alpha d_i. The
  noise vanishes with the steps (Mishchenko et al. 2019, DIANA), so the run converges to the optimum.
- paper: Q(grad h_i(y)) as the paper has it. The noise of H does not vanish at the optimum, as single workers' gradients
  do not: the run stops improving at a relative gap of 1e-4 to 6e-2, and a warning says so.
"""

from __future__ import annotations

import glob
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.codec import Context
from kvstore.compression.encoder import CHUNK_ELEMENTS, KeyEncoder
from kvstore.compression.registry import codec_named, parse_params
from kvstore.errors import ParameterError
from kvstore.store import KVStore

Values: TypeAlias = dict[str, NDArray[Any]]
"""One array per parameter, float32 or float64."""

FullGradient: TypeAlias = Callable[[Values], Mapping[str, NDArray[Any]]]
SampleGradient: TypeAlias = Callable[
    [Values, Values, int], tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]
]

_SCALARS = "qsvrg"  # the key of what is summed exactly
_E = TypeVar("_E", bound=StrEnum)


class Snapshot(StrEnum):
    """How the gradient at the snapshot is sent."""

    EXACT = "exact"
    DIFF = "diff"
    PAPER = "paper"


class Sampling(StrEnum):
    """Over which samples j is drawn: this worker's own, or all (which every worker can then read)."""

    LOCAL = "local"
    GLOBAL = "global"


class Average(StrEnum):
    """The next snapshot: the mean of all iterates (the paper), or the last one."""

    ALL = "all"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Epoch:
    """p: its number, from 1. objective: f at its snapshot, None if not given. bits_sent: by this worker, in it."""

    p: int
    objective: float | None
    bits_sent: int


class QSVRG:
    """Runs the same on every rank of a store that it has to itself: no optimizer, compression set here."""

    def __init__(
        self,
        kv: KVStore,
        keys: Mapping[str, NDArray[Any]],
        full_grad: FullGradient,
        sample_grad: SampleGradient,
        *,
        samples: int,
        lr: float,
        epoch_len: int = 100,
        levels: int | str = "sqrt",
        snapshot: str = "diff",
        sampling: str = "local",
        average: str = "all",
        objective: Callable[[Values], float] | None = None,
        seed: int = 0,
    ) -> None:
        """Every rank calls it with the same settings; the values of rank 0 are where it starts.

        Args:
            keys: names of parameters to their values.
            full_grad: at given values, the mean gradient over this worker's own samples.
            sample_grad: (x, y, j) -> the gradients of sample j at x and at y. j counts this worker's own samples; with
                sampling='global' those of all workers.
            samples: how many this worker has.
            lr: the step; 0.1 / L is safe for L-smooth f_j.
            epoch_len: T, inner steps per epoch; 20 L / l for the paper's rate.
            levels: of the quantiser, whose norm is l2; 'sqrt' is the square root of a parameter's size.
            objective: at given values, the mean of f_j over this worker's own samples.
            seed: of the samples drawn and of the quantiser.

        Raises:
            ParameterError: names the setting, what was given, what is allowed; also where the store has an optimizer.
        """
        self.snapshot = _one_of(Snapshot, "snapshot", snapshot)
        self.sampling = _one_of(Sampling, "sampling", sampling)
        self.average = _one_of(Average, "average", average)
        _check(samples >= 1, "samples", samples, "an integer >= 1")
        _check(epoch_len >= 1, "epoch_len", epoch_len, "an integer >= 1")
        _check(math.isfinite(lr) and lr > 0, "lr", lr, "a finite number > 0")
        if self.snapshot is Snapshot.PAPER:
            text = "snapshot='paper' does not converge to the optimum: its noise plateaus; use 'diff' or 'exact'"
            warnings.warn(text, UserWarning, stacklevel=2)
        self.kv, self.lr, self.epoch_len = kv, lr, epoch_len
        self._full_grad, self._sample_grad, self._objective = full_grad, sample_grad, objective
        self._names = list(keys)
        self._random = np.random.default_rng([seed, kv.rank])
        self.y: Values = {name: np.array(value) for name, value in keys.items()}
        self._set_compression(levels, seed)
        self._start(samples)
        self._memory = {name: np.zeros_like(value) for name, value in self.y.items()}  # a_i
        self._memories = {name: np.zeros_like(value) for name, value in self.y.items()}  # the sum of all a_i
        self._round = 0

    def epochs(self, count: int) -> Iterator[Epoch]:
        """Run so many epochs, one per item; `y` holds the values that the item's objective is of."""
        for p in range(1, count + 1):
            before = self._bits()
            objective = None if self._objective is None else self._sum(self._share * self._objective(self.y))
            self._epoch()
            yield Epoch(p, objective, self._bits() - before)

    def _epoch(self) -> None:
        h = self._full_gradient()
        x = {name: value.copy() for name, value in self.y.items()}
        total = {name: np.zeros_like(value) for name, value in x.items()}
        for _ in range(self.epoch_len):
            for name, value in x.items():
                total[name] += value
            at_x, at_y = self._sample_grad(x, self.y, int(self._random.integers(self._drawn)))
            mean = self._reduce("inner", {name: self._weight * (at_x[name] - at_y[name]) + h[name] for name in x})
            x = {name: value - self.lr / self.kv.num_workers * mean[name] for name, value in x.items()}
        last = self.average is Average.LAST
        self.y = x if last else {name: value / self.epoch_len for name, value in total.items()}

    def _full_gradient(self) -> Values:
        """H at y, as `snapshot` says."""
        gradient = self._full_grad(self.y)
        own = {name: self._share * np.asarray(gradient[name]) for name in self._names}
        if self.snapshot is not Snapshot.DIFF:
            return self._reduce("snapshot", own)
        change = {name: self._fit(name, value - self._memory[name]) for name, value in own.items()}
        self._round += 1
        sent = {name: self._sent(name, value) for name, value in change.items()}
        total = self._reduce("snapshot", change)
        h = {name: self._memories[name] + total[name] for name in self._names}
        for name, alpha in self._alpha.items():
            self._memory[name] = self._memory[name] + alpha * sent[name]
            self._memories[name] = self._memories[name] + alpha * total[name]
        return h

    def _sent(self, name: str, change: NDArray[Any]) -> NDArray[Any]:
        """What the others receive of this worker's push: encoding is a pure function of seed, rank, key and round."""
        encoder, out = self._mirrors[name], np.zeros(change.size)
        for chunk in encoder.encode(encoder.prepare(change, self._quantiser[name], self._round)):
            ctx = Context(encoder.key, chunk.n, chunk.index, chunk.offset, dtype=encoder.dtype)
            codec_named(chunk.codec).decode_add(chunk.payload, out[chunk.offset : chunk.offset + chunk.n], ctx)
        return out.reshape(change.shape).astype(change.dtype)

    def _reduce(self, kind: str, values: Mapping[str, NDArray[Any]]) -> Values:
        """The sum over all workers, collectively."""
        keys = [f"{kind}/{name}" for name in self._names]
        arrays = [self._fit(name, values[name]) for name in self._names]
        outs = [np.empty_like(array) for array in arrays]
        self.kv.pushpull(keys, arrays, out=outs)
        return {name: out * self._scale for name, out in zip(self._names, outs, strict=True)}

    def _fit(self, name: str, value: NDArray[Any]) -> NDArray[Any]:
        like = self.y[name]
        return np.ascontiguousarray(value, like.dtype).reshape(like.shape)

    def _sum(self, value: float) -> float:
        out = np.zeros(1)
        self.kv.pushpull(_SCALARS, np.array([value]), out=out)
        return float(out[0]) * self._scale

    def _set_compression(self, levels: int | str, seed: int) -> None:
        """The l2 quantiser for every message but the exact ones, with a bucket as large as what is encoded at once."""
        chunk = int(getattr(self.kv, "chunk_elements", CHUNK_ELEMENTS))
        self._mirrors, self._alpha, rules = {}, {}, {_SCALARS: {"type": "none"}}
        self._quantiser = {}
        for name, value in self.y.items():
            d = max(min(value.size, chunk), 1)
            s = math.isqrt(d - 1) + 1 if levels == "sqrt" else int(levels)
            rule = {"type": "qsgd", "levels": str(s), "bucket_size": str(d), "norm": "l2", "seed": str(seed)}
            self._quantiser[name] = parse_params(rule)
            self._alpha[name] = 1 / (1 + min(d / s**2, math.sqrt(d) / s))
            exact = self.snapshot is Snapshot.EXACT
            rules[glob.escape(f"snapshot/{name}")] = {"type": "none"} if exact else rule
            rules[glob.escape(f"inner/{name}")] = rule
            key = f"snapshot/{name}"
            self._mirrors[name] = KeyEncoder(key, value.size, value.dtype, rank=self.kv.rank, chunk_elements=chunk)
        self.kv.set_gradient_compression({"type": "qsgd", "norm": "l2", "seed": str(seed)}, rules)

    def _start(self, samples: int) -> None:
        """Make the keys, agree on where to start, and learn how many samples there are."""
        kv, workers = self.kv, self.kv.num_workers
        kv.init(_SCALARS, np.zeros(1))
        for name, value in self.y.items():
            kv.broadcast(f"inner/{name}", value, out=value)
            kv.init(f"snapshot/{name}", np.zeros_like(value))
        self._scale = 1.0
        ones = self._sum(1.0)
        _check(ones in (1.0, float(workers)), "kv", kv, "a store without optimizer, used by nothing else")
        self._scale = workers / ones  # a store may average
        total = round(self._sum(float(samples)))
        self._share = samples / total
        own = self.sampling is Sampling.LOCAL
        self._drawn, self._weight = (samples, workers * self._share) if own else (total, 1.0)

    def _bits(self) -> int:
        return 8 * int(self.kv.stats()["total"]["sent_bytes"])


def _one_of(kind: type[_E], name: str, given: str) -> _E:
    _check(given in list(kind), name, given, "one of " + ", ".join(kind))
    return kind(given)


def _check(holds: bool, name: str, given: object, allowed: str) -> None:
    if not holds:
        text = f"QSVRG parameter {name!r}: got {given!r}, allowed is {allowed}"
        raise ParameterError(text, parameter=name, given=str(given), allowed=allowed)
