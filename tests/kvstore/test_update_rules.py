"""The built-in rules against MXNet 1.9.1: recorded servers (golden_opt.npz) and recorded updaters (optimizers.npz)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.optimizer import OPTIMIZERS, Array, Optimizer, create_optimizer, make_spec

GOLDEN = Path(__file__).parent / "golden"
with np.load(GOLDEN / "optimizers.npz") as _file:
    ORACLE: dict[str, Array] = dict(_file)
CASES: list[tuple[str, dict[str, Any]]] = json.loads(str(ORACLE["cases"]))
VARIED: dict[str, dict[str, Any]] = {
    name: {"learning_rate": 0.05, "wd": 0.1, "clip_gradient": 0.3, "rescale_grad": 0.3} for name in OPTIMIZERS
} | {
    "nag": {"momentum": 0.9, "wd": 0.1},
    "sgd": {"momentum": 0.9, "wd": 0.1},
    "rmsprop": {"centered": True, "wd": 0.1},
}


def run(rule: Optimizer[Any], start: Array, grads: Array, chunk: int | None = None) -> Array:
    """Return the values (steps, n) after each update, chunk by chunk."""
    n, chunk = start.size, chunk or start.size
    rows = np.empty_like(grads)
    for offset in range(0, n, chunk):
        part = slice(offset, min(offset + chunk, n))
        value, state = start[part], rule.create_state(part.stop - offset, start.dtype)
        for step, grad in enumerate(grads[:, part], start=1):
            value = rule.update("w", (n,), offset, value, grad.copy(), state, step)
            rows[step - 1, part] = value
    return rows


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{i}-{name}" for i, (name, _) in enumerate(CASES)])
def test_equals_mxnet_to_the_last_bit(index: int) -> None:
    name, params = CASES[index]
    values = run(create_optimizer(make_spec(name, **params)), ORACLE["start"], ORACLE["grads"])
    np.testing.assert_array_equal(values, ORACLE[f"values_{index}"])


def test_every_rule_of_mxnet_was_recorded() -> None:
    assert {name for name, _ in CASES} == set(OPTIMIZERS) - {"adamw"}


def quantised(grad: Array, residual: Array) -> Array:
    """Two-bit quantisation at threshold 0.5; `residual` keeps what is left."""
    residual += grad
    sent = (np.float32(0.5) * (residual >= 0.5) - np.float32(0.5) * (residual <= -0.5)).astype("f4")
    residual -= sent
    return sent


@pytest.mark.parametrize("compression", ["none", "2bit"])
@pytest.mark.parametrize(("name", "params"), [("sgd", {"learning_rate": 0.1, "rescale_grad": 0.5}), ("test", {})])
def test_equals_servers_of_mxnet_to_the_last_bit(compression: str, name: str, params: dict[str, Any]) -> None:
    with np.load(GOLDEN / "golden_opt.npz") as file:
        expected = file[f"{compression}/{name}"]
    rule = create_optimizer(make_spec(name, **(params or {"rescale_grad": 2})))
    value = np.linspace(-1, 1, 100).astype("f4")
    state, residuals = rule.create_state(100, value.dtype), np.zeros((2, 100), "f4")
    for number in range(6):
        grads = [(np.random.RandomState(77 + 10 * number + r).standard_normal(100) * 0.6).astype("f4") for r in (0, 1)]
        if compression == "2bit":
            grads = [quantised(grad, residual) for grad, residual in zip(grads, residuals, strict=True)]
        value = rule.update("w", (100,), 0, value, grads[0] + grads[1], state, number + 1)
        np.testing.assert_array_equal(value, expected[number])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_r06_chunks_do_not_change_the_result(name: str, dtype: str) -> None:
    rule = create_optimizer(make_spec(name, **VARIED[name]))
    random = np.random.default_rng(6)
    start, grads = random.standard_normal(1000).astype(dtype), random.standard_normal((4, 1000)).astype(dtype)
    whole = run(rule, start, grads)
    assert whole.dtype == np.dtype(dtype)
    for chunk in (1, 7, 64, 999):
        np.testing.assert_array_equal(run(rule, start, grads, chunk), whole)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_returns_a_new_array_and_keeps_the_value(name: str) -> None:
    rule = create_optimizer(make_spec(name, **VARIED[name]))
    value, grad = np.linspace(-1, 1, 50, dtype="f4"), np.linspace(1, 2, 50, dtype="f4")
    value.flags.writeable = False
    before, state = value.copy(), rule.create_state(50, value.dtype)
    new = rule.update("w", (50,), 0, value, grad, state, 1)
    np.testing.assert_array_equal(value, before)
    assert not np.array_equal(new, before)
    assert new.flags.writeable
    assert not any(np.shares_memory(new, other) for other in (value, grad, *state.values()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_non_finite_gradients_pass_without_warnings(name: str) -> None:
    rule = create_optimizer(make_spec(name, **VARIED[name]))
    value, grad = np.ones(3, "f4"), np.array([np.nan, np.inf, 1], "f4")
    new = rule.update("w", (3,), 0, value, grad, rule.create_state(3, value.dtype), 1)
    assert np.isnan(new[0])
    assert np.isfinite(new[2])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_empty_chunks_stay_empty(name: str) -> None:
    rule, empty = create_optimizer(make_spec(name)), np.zeros(0, "f4")
    assert rule.update("w", (3, 0), 0, empty, empty.copy(), rule.create_state(0, empty.dtype), 1).shape == (0,)


def test_adamw_decays_apart_from_the_moments() -> None:
    lr, wd, beta1, beta2, epsilon = 0.01, 0.1, 0.8, 0.95, 1e-8
    rule = create_optimizer(
        make_spec("adamw", learning_rate=lr, wd=wd, beta1=beta1, beta2=beta2, epsilon=epsilon, rescale_grad=0.5)
    )
    start, grads = ORACLE["start"].astype("f8"), ORACLE["grads"].astype("f8")
    w, mean, var = start, np.zeros_like(start), np.zeros_like(start)
    for step, row in enumerate(run(rule, start, grads), start=1):
        g = grads[step - 1] / 2
        mean, var = beta1 * mean + (1 - beta1) * g, beta2 * var + (1 - beta2) * g * g
        corrected = np.sqrt(1 - beta2**step) / (1 - beta1**step)
        w = w * (1 - lr * wd) - lr * corrected * mean / (np.sqrt(var) + epsilon)
        np.testing.assert_allclose(row, w, rtol=1e-12, atol=1e-15)


def test_centered_rmsprop_survives_constant_gradients() -> None:
    rule = create_optimizer(make_spec("rmsprop", centered=True, learning_rate=1e-4, gamma1=0.5))
    values = run(rule, np.ones(64, "f4"), np.tile(np.linspace(1, 100, 64, dtype="f4"), (60, 1)))
    assert np.isfinite(values).all()


def test_r12_rescaled_sum_of_workers_is_one_worker_with_the_larger_batch() -> None:
    grads = np.random.default_rng(12).standard_normal((3, 5, 32)).astype("f4")
    start = np.linspace(-1, 1, 32).astype("f4")
    summed = run(create_optimizer(make_spec("sgd", learning_rate=0.1, rescale_grad=1 / 3)), start, grads.sum(axis=0))
    meaned = run(create_optimizer(make_spec("sgd", learning_rate=0.1)), start, grads.mean(axis=0))
    np.testing.assert_allclose(summed, meaned, rtol=1e-6, atol=1e-6)
