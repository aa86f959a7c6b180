"""QSVRG converges linearly on real data over a real store, except with the paper's own snapshot, which says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import QSVRG
from kvstore.errors import ParameterError

WORKERS, EPOCHS, REGULAR = 3, 60, 0.02


class Logistic:
    """Regularised logistic regression on one worker's part of a data set: f_j of the rows `part`."""

    def __init__(self, features: Any, labels: Any, part: slice) -> None:
        self.a, self.b = features[part], labels[part]

    def objective(self, values: dict[str, Any]) -> float:
        w = values["w"]
        return float(np.logaddexp(0, -self.b * (self.a @ w)).mean() + REGULAR / 2 * w @ w)

    def full(self, values: dict[str, Any]) -> dict[str, Any]:
        w = values["w"]
        share = -self.b / (1 + np.exp(self.b * (self.a @ w)))
        return {"w": self.a.T @ share / len(self.b) + REGULAR * w}

    def one(self, w: Any, j: int) -> dict[str, Any]:
        return {"w": self.a[j] * (-self.b[j] / (1 + np.exp(self.b[j] * (self.a[j] @ w)))) + REGULAR * w}

    def sample(self, x: dict[str, Any], y: dict[str, Any], j: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.one(x["w"], j), self.one(y["w"], j)


def data_set(name: str) -> tuple[Any, Any, float]:
    """Rows of norm 1 with labels of -1 and 1 in sorted order (the hard partition), and the smoothness L."""
    sets = pytest.importorskip("sklearn.datasets")
    features, labels = getattr(sets, f"load_{name}")(return_X_y=True)
    labels = labels % 2 * 2.0 - 1
    features = features - features.mean(axis=0)
    scale = features.std(axis=0)
    features = features / np.where(scale > 0, scale, 1)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    order = np.argsort(labels, kind="stable")
    return features[order], labels[order], 0.25 + REGULAR


def optimum(features: Any, labels: Any) -> float:
    """f* by Newton's method."""
    w = np.zeros(features.shape[1])
    whole = Logistic(features, labels, slice(None))
    for _ in range(30):
        p = 1 / (1 + np.exp(-(features @ w)))
        hessian = (features.T * (p * (1 - p))) @ features / len(labels) + REGULAR * np.eye(len(w))
        w -= np.linalg.solve(hessian, whole.full({"w": w})["w"])
    return whole.objective({"w": w})


def gaps(make_job: Callable[..., Any], name: str, snapshot: str, epochs: int = EPOCHS, **settings: Any) -> Any:
    """f(y_p) - f* for p = 1 .. epochs + 1, on a job of three workers; all ranks see the same."""
    features, labels, smooth = data_set(name)
    bounds = np.linspace(0, len(labels), WORKERS + 1).astype(int)

    def work(kv: Any) -> list[float]:
        own = Logistic(features, labels, slice(bounds[kv.rank], bounds[kv.rank + 1]))
        samples = int(bounds[kv.rank + 1] - bounds[kv.rank])
        start = {"w": np.zeros(features.shape[1])}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if snapshot == "paper" else "error")
            run = QSVRG(
                kv,
                start,
                own.full,
                own.sample,
                samples=samples,
                lr=0.4 / smooth,
                epoch_len=40,
                snapshot=snapshot,
                objective=own.objective,
                **settings,
            )
        return [epoch.objective or 0.0 for epoch in run.epochs(epochs + 1)]

    results = make_job(WORKERS).parallel(work)
    assert results[0] == results[1] == results[2]
    return np.array(results[0]) - optimum(features, labels)


@pytest.mark.parametrize("name", ["breast_cancer", "digits"])
@pytest.mark.parametrize("snapshot", ["exact", "diff"])
def test_converges_linearly(make_job: Callable[..., Any], name: str, snapshot: str) -> None:
    gap = gaps(make_job, name, snapshot)
    bound = 0.9 ** np.arange(EPOCHS + 1) * gap[0]
    assert (gap <= bound).all(), np.flatnonzero(gap > bound)
    assert gap[-1] <= 1e-6 * gap[0]


def test_the_snapshot_of_the_paper_plateaus_and_warns(make_job: Callable[..., Any]) -> None:
    gap = gaps(make_job, "digits", "paper", 30)
    assert gap[-5:].mean() > 1e-5 * gap[0]
    with kvstore.create("device") as kv, pytest.warns(UserWarning, match="plateaus"):
        single(kv, snapshot="paper")


def single(kv: Any, **settings: Any) -> QSVRG:
    """One worker, f(w) = the mean of |w - c_j|^2 / 2."""
    centres = np.random.default_rng(0).standard_normal((20, 9))
    return QSVRG(
        kv,
        {"w": np.zeros(9)},
        lambda y: {"w": y["w"] - centres.mean(axis=0)},
        lambda x, y, j: ({"w": x["w"] - centres[j]}, {"w": y["w"] - centres[j]}),
        **{"samples": 20, "lr": 0.3, "epoch_len": 10, **settings},
    )


@pytest.mark.parametrize("average", ["all", "last"])
@pytest.mark.parametrize("sampling", ["local", "global"])
@pytest.mark.parametrize("mean", [False, True])
def test_settings_on_a_store_of_one_worker(average: str, sampling: str, mean: bool) -> None:
    with kvstore.create("device", average=mean) as kv:
        run = single(kv, average=average, sampling=sampling)
        epochs = list(run.epochs(30))
        centres = np.random.default_rng(0).standard_normal((20, 9))
        assert np.allclose(run.y["w"], centres.mean(axis=0), atol=1e-3)
        assert [epoch.p for epoch in epochs] == list(range(1, 31))
        assert epochs[0].objective is None
        # eleven messages of 9 elements, each below raw
        assert 0 < epochs[0].bits_sent < 11 * 9 * 64


@pytest.mark.parametrize(
    ("name", "given"),
    [("snapshot", "none"), ("sampling", "x"), ("average", "x"), ("samples", 0), ("epoch_len", 0), ("lr", float("nan"))],
)
def test_wrong_settings_are_named(name: str, given: Any) -> None:
    with kvstore.create("device") as kv, pytest.raises(ParameterError) as error:
        single(kv, **{name: given})
    assert error.value.parameter == name


def test_a_store_with_an_optimizer_is_refused() -> None:
    with kvstore.create("device") as kv:
        kv.set_optimizer("sgd", learning_rate=0.5)
        with pytest.raises(ParameterError, match="without optimizer"):
            single(kv)
