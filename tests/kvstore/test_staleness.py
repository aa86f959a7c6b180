"""The largest proven learning rate, the warning beyond it, and settings of stores that have no staleness."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.config import Config, read_config
from kvstore.errors import ConfigError, ParameterError
from kvstore.on_stale import OnStale
from kvstore.staleness import (
    check_learning_rate,
    check_synchronous,
    largest_learning_rate,
    rate_from_theory,
    updates_behind,
)

MakeJob = Callable[..., Any]


@pytest.mark.parametrize(("staleness", "rate"), [(0, 4.0), (16, 0.173), (64, 0.0439)])
def test_the_published_figures(staleness: int, rate: float) -> None:
    assert largest_learning_rate(0.25, staleness) == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize("staleness", [1, 5, 100])
def test_it_meets_the_condition_exactly(staleness: int) -> None:
    for smoothness, summed in ((0.1, 1), (3.0, 4)):
        rate = largest_learning_rate(smoothness, staleness, summed)
        x = smoothness * summed * rate
        assert x + 2 * (staleness * x) ** 2 == pytest.approx(1)
    assert largest_learning_rate(1, 10**6) == pytest.approx(0.7071e-6, rel=1e-3)


def test_a_larger_rate_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_learning_rate(0.17, 0.25, 16)
    with pytest.warns(UserWarning, match=r"learning rate 0.2 is above 0.172\d, .* staleness 16"):
        assert not check_learning_rate(0.2, 0.25, 16)


def test_rounds_of_workers_are_many_updates() -> None:
    assert updates_behind(Config(num_workers=4)) is None
    assert updates_behind(Config(num_workers=4, staleness=2, on_stale=OnStale.DROP)) == 2
    assert updates_behind(Config(num_workers=4, staleness=2)) == 5 * 3
    assert updates_behind(Config(num_workers=1, staleness=2)) == 0


def test_theory_needs_both_settings() -> None:
    config = Config(num_workers=2, staleness=16, on_stale=OnStale.SCALE, smoothness=0.25)
    assert rate_from_theory({"learning_rate": "theory", "wd": 1}, config)["learning_rate"] == pytest.approx(
        0.1729, rel=1e-3
    )
    assert rate_from_theory({"learning_rate": 3}, Config()) == {"learning_rate": 3}
    for incomplete in (Config(staleness=1), Config(smoothness=1.0)):
        with pytest.raises(ConfigError, match="KVSTORE_SMOOTHNESS"):
            rate_from_theory({"learning_rate": "theory"}, incomplete)


def test_settings_are_read_and_checked() -> None:
    environment = {"KVSTORE_STALENESS": "3", "KVSTORE_ON_STALE": "drop", "KVSTORE_SMOOTHNESS": "0.5"}
    config = read_config(environment, required=())
    assert (config.staleness, config.on_stale, config.smoothness) == (3, OnStale.DROP, 0.5)
    for name, value in (("staleness", -1), ("on_stale", "wait"), ("smoothness", 0)):
        with pytest.raises(ParameterError) as raised:
            read_config({}, required=(), **{name: value})
        assert raised.value.parameter == name
    with pytest.raises(ParameterError, match="scale needs a staleness of 1 or more"):
        read_config({}, required=(), staleness=0, on_stale="scale")
    with pytest.raises(ParameterError, match=r"'dist_sync' has none"):
        check_synchronous("dist_sync", config)


def test_a_job_bounds_staleness_and_reports_it(make_job: MakeJob) -> None:
    job = make_job(2, 1, store="dist_async", staleness=1, smoothness=0.5)

    def work(store: Any) -> Any:
        store.set_optimizer("sgd", learning_rate="theory")
        store.init("w", np.zeros(100, np.float32))
        store.barrier()
        for _ in range(20):
            store.pushpull("w", np.ones(100, np.float32))
        store.barrier()
        return store.pull("w")

    # each may be 1 round ahead of 1 other, which makes up to 3 updates meanwhile
    expected = -40 * largest_learning_rate(0.5, 3)
    for value in job.parallel(work):
        assert np.allclose(value, expected, rtol=1e-4)
    counts = dict(job.machines[0].shard.staleness.histogram())
    assert sum(counts.values()) == 40
    assert max(counts) <= 3


def test_a_rate_beyond_the_theory_warns_where_it_is_set(make_job: MakeJob) -> None:
    store = make_job(1, 1, store="dist_async", staleness=16, on_stale="drop", smoothness=0.25).stores[0]
    with pytest.warns(UserWarning, match="staleness 16"):
        store.set_optimizer("sgd", learning_rate=1.0)
