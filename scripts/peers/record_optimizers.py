"""Record what MXNet 1.9.1's optimizers and learning-rate schedules do, as the oracle of our update rules.

Run by hand, with a virtual environment of MXNet's own (Python 3.11, x86-64), from the repository root:

    python3 -m venv mx && mx/bin/pip install mxnet==1.9.1 numpy==1.23.5
    mx/bin/python scripts/peers/record_optimizers.py tests/kvstore/golden/optimizers.npz

The file holds `start` (n,), `grads` (steps, n), and for case i `values_i` (steps, n), all float32; for schedule i
`rates_i` (updates,) float64, the rate at update 1, 2, ...; `cases` and `schedules` are JSON texts that name each one.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import mxnet as mx
import numpy as np

STEPS, ELEMENTS, UPDATES = 6, 64, 40

CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"learning_rate": 0.1, "rescale_grad": 0.5, "wd": 0.01}),
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "rescale_grad": 0.25, "wd": 0.01}),
    ("sgd", {"learning_rate": 0.05, "momentum": 0.5, "clip_gradient": 0.3, "wd": 0.1}),
    ("sgd", {"learning_rate": 0.05, "clip_gradient": 0.3, "wd": 0.1}),
    ("sgd", {"learning_rate": 0.07, "rescale_grad": 0.3, "wd": 0.1}),
    ("sgd", {"learning_rate": 0.07, "rescale_grad": 0.3, "momentum": 0.9, "clip_gradient": 0.2}),
    ("nag", {"learning_rate": 0.1}),
    ("nag", {"learning_rate": 0.1, "momentum": 0.9, "rescale_grad": 0.5, "wd": 0.01}),
    ("nag", {"learning_rate": 0.1, "momentum": 0.8, "clip_gradient": 0.2, "wd": 0.01}),
    ("nag", {"learning_rate": 0.07, "rescale_grad": 0.3, "momentum": 0.9, "wd": 0.1}),
    ("adam", {}),
    ("adam", {"learning_rate": 0.01, "wd": 0.1, "rescale_grad": 0.3}),
    ("adam", {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-4, "clip_gradient": 0.3, "wd": 0.2}),
    ("adagrad", {}),
    ("adagrad", {"learning_rate": 0.1, "eps": 1e-3, "wd": 0.05, "rescale_grad": 0.5, "clip_gradient": 0.3}),
    ("rmsprop", {}),
    ("rmsprop", {"learning_rate": 0.01, "gamma1": 0.8, "epsilon": 1e-2, "wd": 0.1, "clip_gradient": 0.3}),
    ("rmsprop", {"learning_rate": 0.01, "rescale_grad": 0.3, "clip_weights": 0.6, "wd": 0.1}),
    ("rmsprop", {"learning_rate": 0.01, "centered": True, "epsilon": 1e-4}),
    ("rmsprop", {"centered": True, "gamma1": 0.8, "gamma2": 0.7, "epsilon": 1e-4, "wd": 0.1, "clip_gradient": 0.3}),
    ("signum", {}),
    ("signum", {"learning_rate": 0.05, "momentum": 0.8, "wd": 0.1, "wd_lh": 0.05, "clip_gradient": 0.3}),
    ("signum", {"rescale_grad": 0.3, "wd": 0.01}),
    ("signum", {"learning_rate": 0.05, "momentum": 0.0, "wd": 0.1, "rescale_grad": 0.5}),
    ("test", {"rescale_grad": 0.5}),
]

WARMUP = {"warmup_steps": 5, "warmup_begin_lr": 0.02}
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("factor", {"step": 7, "factor": 0.5}),
    ("factor", {"step": 3, "factor": 0.1, "stop_factor_lr": 1e-4}),
    ("factor", {"step": 3, "factor": 0.9, **WARMUP}),
    ("multi_factor", {"step": [5, 11, 30], "factor": 0.3}),
    ("multi_factor", {"step": [5, 11], "factor": 0.3, **WARMUP, "warmup_mode": "constant"}),
    ("poly", {"max_update": 25}),
    ("poly", {"max_update": 25, "pwr": 1, "final_lr": 0.03, **WARMUP}),
    ("cosine", {"max_update": 25}),
    ("cosine", {"max_update": 25, "final_lr": 0.01, **WARMUP}),
]
MAKERS = {
    "factor": mx.lr_scheduler.FactorScheduler,
    "multi_factor": mx.lr_scheduler.MultiFactorScheduler,
    "poly": mx.lr_scheduler.PolyScheduler,
    "cosine": mx.lr_scheduler.CosineScheduler,
}


def inputs() -> tuple[Any, Any]:
    """Return start (n,) and grads (steps, n), with an element that never has a gradient and some at a clip limit."""
    random = np.random.RandomState(20)
    start = np.linspace(-1, 1, ELEMENTS).astype("f4")
    grads = (random.standard_normal((STEPS, ELEMENTS)) * 0.6).astype("f4")
    grads[:, 0] = 0
    grads[:, 1] = 0.3
    grads[0, 2] = 100
    grads[:, 3] *= 1e-5
    return start, grads


def record_case(name: str, params: dict[str, Any], start: Any, grads: Any) -> Any:
    """Return the values (steps, n) after each update, through the updater a server of MXNet uses."""
    update = mx.optimizer.get_updater(mx.optimizer.create(name, **params))
    value = mx.nd.array(start)
    rows = []
    for grad in grads:
        update(0, mx.nd.array(grad), value)
        rows.append(value.asnumpy().copy())
    return np.stack(rows)


def main(path: str) -> None:
    """Record every case and schedule into one .npz file."""
    start, grads = inputs()
    out = {"start": start, "grads": grads, "cases": np.array(json.dumps(CASES)), "schedules": json.dumps(SCHEDULES)}
    for i, (name, params) in enumerate(CASES):
        out[f"values_{i}"] = record_case(name, params, start, grads)
    for i, (name, params) in enumerate(SCHEDULES):
        schedule = MAKERS[name](base_lr=0.1, **params)
        out[f"rates_{i}"] = np.array([schedule(n) for n in range(1, UPDATES + 1)])
    np.savez_compressed(path, **out)
    print(f"{len(CASES)} optimizers and {len(SCHEDULES)} schedules recorded into {path}")


if __name__ == "__main__":
    main(sys.argv[1])
