"""The worker's thread: starting, ending, and the bound on what is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.config import read_config
from kvstore.errors import ClosedError, JoinError, MismatchError, OperationTimeoutError
from kvstore.machine import SCHEDULER
from kvstore.messages import Barrier
from kvstore.operation import Operation, Request
from kvstore.worker_thread import Budget, WorkerThread

MakeJob = Callable[..., Any]


def test_nobody_answers() -> None:
    config = read_config({}, root_uri="127.0.0.1", root_port=1, num_workers=1, num_servers=1, timeout=0.3)
    with pytest.raises(JoinError, match=r"tcp://127\.0\.0\.1:1") as error:
        WorkerThread(config).start()
    assert error.value.role == "worker"
    assert not [thread for thread in threading.enumerate() if thread.name == "kvstore-worker"]


def test_a_refusal_is_told_at_once(make_job: MakeJob) -> None:
    config = make_job(1, 1).config
    other = read_config(
        {}, root_uri="127.0.0.1", root_port=config.root_port, num_workers=5, num_servers=1, job=config.job
    )
    started = time.monotonic()
    with pytest.raises((JoinError, MismatchError)):
        WorkerThread(other).start()
    assert time.monotonic() - started < other.timeout / 3


def test_operations_after_close_end(make_job: MakeJob) -> None:
    store = make_job().stores[0]
    thread = store._thread
    store.close()
    operation = Operation("barrier", time.monotonic() + 10, 1)
    thread.submit(
        operation, [Request(SCHEDULER, lambda number, left: Barrier(sequence=number, rank=0, turn=9, timeout=left))]
    )
    assert isinstance(operation.error, ClosedError)
    thread.close()


def test_budget_waits_for_room_and_lets_one_large_pass() -> None:
    budget = Budget(100)
    assert budget.try_take(500)
    assert not budget.try_take(1)
    with pytest.raises(OperationTimeoutError, match="500 bytes"):
        budget.wait_for_room(time.monotonic() + 0.01)
    taken = threading.Event()

    def take() -> None:
        budget.wait_for_room(time.monotonic() + 10, 60)
        budget.add(60)
        taken.set()

    waiting = threading.Thread(target=take)
    waiting.start()
    assert not taken.wait(0.2), "there is no room yet"
    budget.give(500)
    assert taken.wait(10)
    waiting.join()
    assert budget.try_take(40)
    assert not budget.try_take(1)
