"""Settings that all ranks must share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvstore.dist import DistStore
from kvstore.errors import ConfigError, MismatchError, OperationTimeoutError, ParameterError, UnknownNameError
from kvstore.machine import server_address

MakeJob = Callable[..., Any]


def test_different_compression_is_an_error_on_every_rank(make_job: MakeJob) -> None:
    job = make_job(3)
    errors = job.errors(
        lambda store: store.set_gradient_compression({"type": "2bit", "threshold": 1 if store.rank == 2 else 0.5})
    )
    assert all(isinstance(error, MismatchError) for error in errors), errors
    job.parallel(lambda store: store.init("w", np.zeros(64, np.float32)))
    job.parallel(lambda store: store.pushpull("w", np.ones(64, np.float32)))
    assert job.stores[0].stats()["total"]["sent_bytes"] == 256, "a setting that was not agreed on must not be used"
    job.parallel(lambda store: store.set_gradient_compression({"type": "2bit", "threshold": "0.5"}))
    for values in job.parallel(lambda store: store.pushpull("w", np.ones(64, np.float32))):
        np.testing.assert_array_equal(values, np.full(64, 1.5))


def test_r16_a_rank_that_does_not_call_is_named_and_nothing_is_in_force(make_job: MakeJob) -> None:
    job = make_job(2, timeout=2.0)
    with pytest.raises(OperationTimeoutError, match="worker 1"):
        job.stores[0].set_gradient_compression({"type": "2bit", "threshold": 1.0})
    with pytest.raises(OperationTimeoutError, match="worker 1"):  # it comes too late, and is told the same
        job.stores[1].set_gradient_compression({"type": "2bit", "threshold": 1.0})
    job.parallel(lambda store: store.init("w", np.zeros(64, np.float32)))
    for values in job.parallel(lambda store: store.pushpull("w", np.full(64, 0.75, np.float32))):
        np.testing.assert_array_equal(values, np.full(64, 1.5), err_msg="a setting that was not agreed on")
    job.parallel(lambda store: store.set_gradient_compression({"type": "2bit", "threshold": 0.25}))
    for values in job.parallel(lambda store: store.pushpull("w", np.full(64, 0.75, np.float32))):
        np.testing.assert_array_equal(values, np.full(64, 0.5))


def test_rank_0_installs_the_optimizer_and_others_are_compared(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    errors = job.errors(lambda store: store.set_optimizer("sgd", learning_rate=0.5 + store.rank))
    assert errors[0] is None and isinstance(errors[1], MismatchError)
    job.parallel(lambda store: store.set_optimizer("sgd", learning_rate="0.5"))
    job.parallel(lambda store: store.init("w", np.zeros(2, np.float32)))
    for values in job.parallel(lambda store: store.pushpull("w", np.ones(2, np.float32))):
        np.testing.assert_array_equal(values, np.full(2, -1.0))
    job.parallel(lambda store: store.set_learning_rate(2.0))
    for values in job.parallel(lambda store: store.pushpull("w", np.ones(2, np.float32))):
        np.testing.assert_array_equal(values, np.full(2, -5.0))


def test_mistakes_are_found_before_anything_is_sent(make_job: MakeJob) -> None:
    store = make_job().stores[0]
    with pytest.raises(UnknownNameError, match="sgd"):
        store.set_optimizer("sdg")
    with pytest.raises(ParameterError, match="learning_rate"):
        store.set_optimizer("sgd", learning_rate="fast")
    with pytest.raises(ParameterError, match="threshold"):
        store.set_gradient_compression({"type": "2bit", "threshold": "-1"})
    with pytest.raises(ConfigError, match="set_optimizer"):
        store.set_learning_rate(0.1)


def test_status_of_a_server(make_job: MakeJob) -> None:
    store = make_job().stores[0]
    store.set_optimizer("test")
    status = store._settings.status(server_address(0))
    assert status.role.value == "server" and '"test"' in str(status.optimizer)


def test_barriers_count(make_job: MakeJob) -> None:
    """Ranks 1 and 2 are at a barrier; they pass it when rank 0 has come to its own, and wait at the next one."""
    job = make_job(3)
    passed = [[threading.Event() for _ in range(3)] for _ in job.stores]

    def work(store: DistStore) -> None:
        for event in passed[store.rank]:
            store.barrier()
            event.set()

    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(work, store) for store in job.stores[1:]]
        for turn in range(3):
            assert not any(passed[rank][turn].wait(0.1) for rank in (1, 2)), "passed without rank 0"
            job.stores[0].barrier()
            assert all(passed[rank][turn].wait(30) for rank in (1, 2))
    for one in others:
        one.result()
