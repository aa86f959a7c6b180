"""The built-in update rules: names, defaults, formulas and order of rounding are those of MXNet 1.9.1.

Every rule works element by element with single correctly rounded operations, so results do not depend on how a key is
cut into chunks. Scalars are rounded to the value's dtype first, as MXNet does. Below, g is
clip(rescale_grad * grad, -clip_gradient, clip_gradient) and w the value.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from msgspec import Meta

from kvstore.optimizer import Array, Key, Optimizer, OptimizerParams

P = TypeVar("P", bound=OptimizerParams)
State: TypeAlias = dict[str, Array]
Decay: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]
Epsilon: TypeAlias = Annotated[float, Meta(ge=1e-37)]  # anything smaller is 0 in float32, and 0 / 0 would follow


class Rates(NamedTuple):
    """Learning rate and weight decay of one key at one update, and the number of the update (from 1)."""

    lr: float
    wd: float
    step: int


class ElementwiseRule(Optimizer[P]):
    """A rule that treats every element alike; `buffers` are its state arrays, which start at 0."""

    buffers: tuple[str, ...] = ()

    def create_state(self, n: int, dtype: np.dtype[Any]) -> State:
        """Return one array (n,) of zeros per buffer."""
        return {name: np.zeros(n, dtype) for name in self.buffers}

    def update(
        self, key: Key, shape: tuple[int, ...], offset: int, value: Array, grad: Array, state: State, step: int
    ) -> Array:
        """Return the new values; see `Optimizer.update`."""
        # Whether NaN and infinity may come here is decided where gradients enter; they pass through without warnings.
        with np.errstate(all="ignore"):
            return self.apply(value, grad, state, Rates(self.learning_rate(key, step), self.weight_decay(key), step))

    @abstractmethod
    def apply(self, value: Array, grad: Array, state: State, rates: Rates) -> Array:
        """Return the new values (n,); `grad` is scratch, `state` is updated in place."""

    def rescale(self, grad: Array) -> Array:
        """Turn `grad` into g, in place."""
        if self.params.rescale_grad != 1:
            np.multiply(grad, grad.dtype.type(self.params.rescale_grad), out=grad)
        return self.clip(grad)

    def rescale_with_decay(self, value: Array, grad: Array, wd: float) -> Array:
        """Turn `grad` into clip(rescale_grad * grad + wd * w), in place: MXNet's order for adam and rmsprop."""
        np.multiply(grad, grad.dtype.type(self.params.rescale_grad), out=grad)
        if wd:
            np.add(grad, value * value.dtype.type(wd), out=grad)
        return self.clip(grad)

    def clip(self, grad: Array) -> Array:
        """Clip `grad` in place to plus or minus `clip_gradient`."""
        if self.params.clip_gradient is not None:
            limit = grad.dtype.type(self.params.clip_gradient)
            np.clip(grad, -limit, limit, out=grad)
        return grad


class MomentumParams(OptimizerParams, frozen=True, kw_only=True):
    """`momentum` 0 keeps no state."""

    momentum: Annotated[float, Meta(ge=0, le=1)] = 0.0


class Sgd(ElementwiseRule[MomentumParams]):
    """m <- momentum * m - lr * wd * w - lr * g;  w <- w + m."""

    Params = MomentumParams

    def create_state(self, n: int, dtype: np.dtype[Any]) -> State:
        """Return the momentum, or nothing when there is none."""
        return {"momentum": np.zeros(n, dtype)} if self.params.momentum else {}

    def apply(self, value: Array, grad: Array, state: State, rates: Rates) -> Array:
        """Return w + m."""
        number = value.dtype.type
        lr, wd = number(rates.lr), number(rates.wd)
        if self.params.clip_gradient is None:
            np.multiply(grad, lr * number(self.params.rescale_grad), out=grad)
        else:
            np.multiply(self.rescale(grad), lr, out=grad)
        if not self.params.momentum:
            if rates.wd:
                np.add(grad, value * (lr * wd), out=grad)
            stepped: Array = np.subtract(value, grad)
            return stepped
        momentum = state["momentum"]
        np.multiply(momentum, number(self.params.momentum), out=momentum)
        out: Array = np.multiply(value, lr * wd)
        np.subtract(momentum, out, out=momentum)
        np.subtract(momentum, grad, out=momentum)
        return np.add(value, momentum, out=out)


class Nag(Sgd):
    """Nesterov's accelerated gradient.

    m <- momentum * m;  w' <- w - m + (momentum + 1) * (m - lr * (g + wd * w));  m <- m - lr * (g + wd * w').
    That the last term takes the new value w' is a peculiarity of MXNet 1.9.1, whose kernel has stored w' before it
    reads w again; it is kept, so that runs can be compared. Without momentum this is sgd.
    """

    def apply(self, value: Array, grad: Array, state: State, rates: Rates) -> Array:
        """Return w'."""
        if not self.params.momentum:
            return super().apply(value, grad, state, rates)
        number = value.dtype.type
        lr, wd, factor, momentum = number(rates.lr), number(rates.wd), number(self.params.momentum), state["momentum"]
        np.multiply(momentum, factor, out=momentum)
        self.rescale(grad)
        ahead = _decayed_step(value, grad, lr, wd)
        np.subtract(momentum, ahead, out=ahead)
        np.multiply(ahead, factor + number(1), out=ahead)
        out: Array = np.subtract(value, momentum)
        np.add(out, ahead, out=out)
        np.subtract(momentum, _decayed_step(out, grad, lr, wd, ahead), out=momentum)
        return out


def _decayed_step(value: Array, grad: Array, lr: Any, wd: Any, into: Array | None = None) -> Array:
    """Return lr * (grad + wd * value)."""
    out: Array = np.multiply(value, wd, out=into)
    np.add(out, grad, out=out)
    np.multiply(out, lr, out=out)
    return out


class SignumParams(OptimizerParams, frozen=True, kw_only=True):
    """`wd_lh` is decoupled weight decay, beside `wd` in the gradient; `momentum` 0 is signSGD and keeps no state."""

    momentum: Decay = 0.9
    wd_lh: Annotated[float, Meta(ge=0)] = 0.0


class Signum(ElementwiseRule[SignumParams]):
    """Bernstein 2018 (arXiv 1802.04434).

    m <- momentum * m - (1 - momentum) * wd * w - (1 - momentum) * g;  w <- (1 - lr * wd_lh) * w + lr * sign(m).
    Without momentum, as in MXNet: w <- (1 - lr * wd) * w - lr * sign(g), where both decays shrink w.
    """

    Params = SignumParams

    def create_state(self, n: int, dtype: np.dtype[Any]) -> State:
        """Return the momentum, or nothing when there is none."""
        return {"momentum": np.zeros(n, dtype)} if self.params.momentum else {}

    def apply(self, value: Array, grad: Array, state: State, rates: Rates) -> Array:
        """Return the new values."""
        number = value.dtype.type
        lr, one, shrink = number(rates.lr), number(1), number(self.params.wd_lh)
        self.rescale(grad)
        if self.params.momentum:
            factor, momentum = number(self.params.momentum), state["momentum"]
            rest = one - factor
            np.multiply(momentum, factor, out=momentum)
            out: Array = np.multiply(value, rest * number(rates.wd))
            np.subtract(momentum, out, out=momentum)
            np.multiply(grad, rest, out=grad)
            np.subtract(momentum, grad, out=momentum)
            np.sign(momentum, out=grad)
        else:
            shrink, out = shrink + number(rates.wd), np.empty_like(value)
            np.sign(grad, out=grad)
            np.negative(grad, out=grad)
        np.multiply(value, one - lr * shrink, out=out)
        np.multiply(grad, lr, out=grad)
        return np.add(out, grad, out=out)


class Test(ElementwiseRule[OptimizerParams]):
    """w <- w + rescale_grad * grad: no rate, no decay, no clipping. For tests of a store."""

    __test__ = False  # not a pytest class

    def apply(self, value: Array, grad: Array, state: State, rates: Rates) -> Array:
        """Return the new values."""
        np.multiply(grad, grad.dtype.type(self.params.rescale_grad), out=grad)
        out: Array = np.add(value, grad)
        return out
