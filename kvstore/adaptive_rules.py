"""The update rules that divide by a running size of the gradient: adam, adamw, adagrad, rmsprop.

As in `update_rules`: MXNet 1.9.1's names, defaults, formulas and order of rounding; g is
clip(rescale_grad * grad, -clip_gradient, clip_gradient), w the value.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from kvstore.optimizer import Array, OptimizerParams
from kvstore.update_rules import Decay, ElementwiseRule, Epsilon, Rates, State


class AdamParams(OptimizerParams, frozen=True, kw_only=True):
    """Decay rates of the two moments, and what keeps the division from 0 / 0."""

    learning_rate: Annotated[float, Meta(ge=0)] = 0.001
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Epsilon = 1e-8


class Adam(ElementwiseRule[AdamParams]):
    """Kingma and Ba 2015 (arXiv 1412.6980), with the bias correction in the rate.

    g <- clip(rescale_grad * grad + wd * w);  mean <- beta1 * mean + (1 - beta1) * g;
    var <- beta2 * var + (1 - beta2) * g^2;  w <- w - lr_t * mean / (sqrt(var) + epsilon)
    with lr_t = lr * sqrt(1 - beta2^step) / (1 - beta1^step).
    """

    Params = AdamParams
    buffers = ("mean", "var")

    def apply(self, value: Array, grad: Array, state: State, rates: Rates) -> Array:
        """Return the new values."""
        out = self.direction(self.rescale_with_decay(value, grad, rates.wd), state, rates)
        return np.subtract(value, out, out=out)

    def direction(self, grad: Array, state: State, rates: Rates) -> Array:
        """Take g into the moments; return lr_t * mean / (sqrt(var) + epsilon) as a new array."""
        number, params, mean, var = grad.dtype.type, self.params, state["mean"], state["var"]
        beta1, beta2 = number(params.beta1), number(params.beta2)
        np.multiply(mean, beta1, out=mean)
        out: Array = np.multiply(grad, number(1) - beta1)
        np.add(mean, out, out=mean)
        np.multiply(var, beta2, out=var)
        np.multiply(grad, number(1) - beta2, out=out)
        np.multiply(out, grad, out=out)
        np.add(var, out, out=var)
        np.sqrt(var, out=out)
        np.add(out, number(params.epsilon), out=out)
        rate = rates.lr * float(np.sqrt(1 - params.beta2**rates.step)) / (1 - params.beta1**rates.step)
        np.multiply(mean, number(rate), out=grad)
        return np.divide(grad, out, out=out)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101).

    The moments see the gradient alone: w <- w - lr_t * mean / (sqrt(var) + epsilon) - lr * wd * w.
    """

    def apply(self, value: Array, grad: Array, state: State, rates: Rates) -> Array:
        """Return the new values."""
        out = self.direction(self.rescale(grad), state, rates)
        np.subtract(value, out, out=out)
        if rates.wd:
            np.multiply(value, value.dtype.type(rates.lr * rates.wd), out=grad)
            np.subtract(out, grad, out=out)
        return out


class AdaGradParams(OptimizerParams, frozen=True, kw_only=True):
    """`eps` keeps the division from 0 / 0."""

    eps: Epsilon = 1e-7


class AdaGrad(ElementwiseRule[AdaGradParams]):
    """Duchi 2011: history <- history + g^2;  w <- w - lr * (g / sqrt(history + eps) + wd * w)."""

    Params = AdaGradParams
    buffers = ("history",)

    def apply(self, value: Array, grad: Array, state: State, rates: Rates) -> Array:
        """Return the new values."""
        number, history = value.dtype.type, state["history"]
        self.rescale(grad)
        out: Array = np.multiply(grad, grad)
        np.add(history, out, out=history)
        np.add(history, number(self.params.eps), out=out)
        np.sqrt(out, out=out)
        np.divide(grad, out, out=out)
        if rates.wd:
            np.multiply(value, number(rates.wd), out=grad)
            np.add(out, grad, out=out)
        np.multiply(out, number(rates.lr), out=out)
        return np.subtract(value, out, out=out)


class RmsPropParams(OptimizerParams, frozen=True, kw_only=True):
    """`gamma1` decays the averages, `gamma2` the step (centered only); `clip_weights` bounds the new values."""

    learning_rate: Annotated[float, Meta(ge=0)] = 0.001
    gamma1: Decay = 0.9
    gamma2: Decay = 0.9
    epsilon: Epsilon = 1e-8
    centered: bool = False
    clip_weights: Annotated[float, Meta(gt=0)] | None = None


class RmsProp(ElementwiseRule[RmsPropParams]):
    """Tieleman and Hinton 2012, or with `centered` Graves 2013 (arXiv 1308.0850, 38 to 45).

    g <- clip(rescale_grad * grad + wd * w);  n <- (1 - gamma1) * g^2 + gamma1 * n;  w <- w - lr * g / sqrt(n + epsilon)
    centered: a <- (1 - gamma1) * g + gamma1 * a;  delta <- gamma2 * delta - lr * g / sqrt(n - a^2 + epsilon);
    w <- w + delta.
    Rounding can push n - a^2 below 0, where MXNet gives NaN; here it is then taken as 0.
    """

    Params = RmsPropParams

    def create_state(self, n: int, dtype: np.dtype[Any]) -> State:
        """Return n, and with `centered` also the mean gradient and the last step."""
        names = ("n", "g", "delta") if self.params.centered else ("n",)
        return {name: np.zeros(n, dtype) for name in names}

    def apply(self, value: Array, grad: Array, state: State, rates: Rates) -> Array:
        """Return the new values."""
        self.rescale_with_decay(value, grad, rates.wd)
        out = (
            self.centered(value, grad, state, rates) if self.params.centered else self.plain(value, grad, state, rates)
        )
        if self.params.clip_weights is not None:
            limit = value.dtype.type(self.params.clip_weights)
            np.clip(out, -limit, limit, out=out)
        return out

    def plain(self, value: Array, grad: Array, state: State, rates: Rates) -> Array:
        """Hinton's version."""
        number, squares = value.dtype.type, state["n"]
        gamma1 = number(self.params.gamma1)
        np.multiply(squares, gamma1, out=squares)
        out: Array = np.multiply(grad, grad)
        np.multiply(out, number(1) - gamma1, out=out)
        np.add(squares, out, out=squares)
        np.add(squares, number(self.params.epsilon), out=out)
        np.sqrt(out, out=out)
        np.divide(grad, out, out=out)
        np.multiply(out, number(rates.lr), out=out)
        return np.subtract(value, out, out=out)

    def centered(self, value: Array, grad: Array, state: State, rates: Rates) -> Array:
        """Graves's version."""
        number, squares, mean, delta = value.dtype.type, state["n"], state["g"], state["delta"]
        gamma1 = number(self.params.gamma1)
        out: Array = np.multiply(grad, number(1) - gamma1)
        np.multiply(mean, gamma1, out=mean)
        np.add(mean, out, out=mean)
        np.multiply(out, grad, out=out)
        np.multiply(squares, gamma1, out=squares)
        np.add(squares, out, out=squares)
        np.multiply(mean, mean, out=out)
        np.subtract(squares, out, out=out)
        np.maximum(out, number(0), out=out)
        np.add(out, number(self.params.epsilon), out=out)
        np.sqrt(out, out=out)
        np.multiply(grad, number(rates.lr), out=grad)
        np.divide(grad, out, out=out)
        np.multiply(delta, number(self.params.gamma2), out=delta)
        np.subtract(delta, out, out=delta)
        return np.add(value, delta, out=out)
