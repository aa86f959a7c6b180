"""Whole clusters without and with faults: exact sums, nothing lost or applied twice, everything ends.

Scheduler, servers and workers run on simulated time; each machine's `validate` runs after each event.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore import optimizer as optimizers
from kvstore.errors import ArrayError, ConfigError
from kvstore.memory_network import Faults
from kvstore.optimizer import Optimizer, OptimizerParams

MakeCluster = Callable[..., Any]
Array = np.ndarray[Any, Any]

ROUGH = Faults(delay=(0.0002, 0.05), stall=0.02, stall_seconds=3.0, disconnect=0.01, duplicate=0.05)
SIZES = {"small": 10, "one chunk": 64, "spread": 300}
SEEDS = 40 if os.environ.get("GRADKV_TEST_SIZE") == "small" else 200


def gradient(seed: int, key: str, rank: int, number: int) -> Array:
    """Values of many magnitudes: their float32 sum depends on the order of addition."""
    generator = np.random.default_rng([seed, len(key), rank, number])
    size = SIZES[key]
    return (generator.standard_normal(size) * 10.0 ** generator.integers(-3, 4, size)).astype(np.float32)


def exact_sum(seed: int, key: str, workers: int, number: int) -> Array:
    total = gradient(seed, key, 0, number)
    for rank in range(1, workers):
        total = total + gradient(seed, key, rank, number)
    return total


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_rounds_give_the_same_bits_on_any_number_of_servers(make_cluster: MakeCluster, servers: int) -> None:
    cluster = make_cluster(workers=3, servers=servers)
    for key, size in SIZES.items():
        cluster.init(key, np.full(size, 7, np.float32))
        assert all((value == 7).all() for value in cluster.pull_all(key))
    for number in (1, 2, 3):
        for key in SIZES:
            cluster.wait([worker.push(key, gradient(5, key, worker.rank, number)) for worker in cluster.workers[::-1]])
            expected = exact_sum(5, key, 3, number).tobytes()
            assert [value.tobytes() for value in cluster.pull_all(key)] == [expected] * 3


def rounds(cluster: Any, worker: Any, seed: int, count: int) -> Iterator[Any]:
    """One worker's life: in each round pushes all keys in an order of its own and pulls them at times of its own."""
    chance = random.Random(f"{seed} {worker.rank}")
    pulls: list[tuple[str, int, Any, Array]] = []
    for number in range(1, count + 1):
        for key in chance.sample(sorted(SIZES), len(SIZES)):
            pushed = worker.push(key, gradient(seed, key, worker.rank, number), chance.randrange(3))
            pulls.append((key, number, *worker.pull(key, chance.randrange(3))))
            if chance.random() < 0.3:
                yield pushed
            earlier = [pull for pull in pulls if pull[1] < number]
            if earlier and chance.random() < 0.3:  # of this round, others may wait for what is pushed after this
                yield chance.choice(earlier)[2]
    for key, number, operation, value in pulls:
        yield operation
        assert operation.error is None, operation.error
        expected = exact_sum(seed, key, len(cluster.workers), number)
        assert value.tobytes() == expected.tobytes(), f"seed {seed}: {key!r}, round {number}, rank {worker.rank}"


def run_rounds(make_cluster: MakeCluster, seed: int) -> None:
    chance = random.Random(seed)
    cluster = make_cluster(seed, chance.randint(1, 3), chance.randint(1, 3), ROUGH, timeout=200.0)
    for key, size in SIZES.items():
        cluster.init(key, np.zeros(size, np.float32))
    cluster.run_programs([rounds(cluster, worker, seed, 4) for worker in cluster.workers])
    sessions = [cluster.session(worker.name) for worker in cluster.workers]
    cluster.run_until(lambda: all(session.idle() for session in sessions), 60.0, "the end of all operations")


@pytest.mark.parametrize("seed", range(15))
def test_rounds_over_a_rough_network(make_cluster: MakeCluster, seed: int) -> None:
    run_rounds(make_cluster, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1000 + SEEDS))
def test_many_rounds_over_a_rough_network(make_cluster: MakeCluster, seed: int) -> None:
    run_rounds(make_cluster, seed)


# --- updates: what is applied twice or not at all shows in every later value ------------------------------------------


class Counting(Optimizer[OptimizerParams]):
    """value + sum, of whole arrays only."""

    whole = True

    def create_state(self, n: int, dtype: np.dtype[Any]) -> dict[str, Array]:
        return {"pushes": np.zeros(n, dtype)}

    def update(
        self, key: Any, shape: tuple[int, ...], offset: int, value: Array, grad: Array, state: Any, step: int
    ) -> Array:
        assert (value.size, state["pushes"].size, offset) == (int(np.prod(shape)), value.size, 0)
        state["pushes"] += 1
        assert (state["pushes"] == step).all()
        return value + grad


def pushes(worker: Any, seed: int, count: int) -> Iterator[Any]:
    """Integers in all elements, so that sums are exact in every order; some rounds as 2bit."""
    chance = random.Random(f"{seed} {worker.rank}")
    for number in range(1, count + 1):
        for key in chance.sample(sorted(SIZES), len(SIZES)):
            size = SIZES[key]
            if chance.random() < 0.3:
                yield worker.pull(key)[0]
            codec = {"type": "2bit", "threshold": 4.0} if chance.random() < 0.5 else {}
            operation = worker.push(key, np.full(size, 4.0, np.float32), chance.randrange(3), **codec)
            if chance.random() < 0.2:
                yield operation
        if number % 2:
            yield operation


def run_updates(make_cluster: MakeCluster, seed: int, sync: bool, rule: str) -> None:
    chance = random.Random(seed)
    workers = chance.randint(1, 3)
    cluster = make_cluster(seed, workers, chance.randint(1, 3), ROUGH, sync=sync, timeout=200.0)
    cluster.set_optimizer(rule)
    for key, size in SIZES.items():
        cluster.init(key, np.full(size, 100, np.float32), whole=rule == "counting")
    cluster.run_programs([pushes(worker, seed, 5) for worker in cluster.workers])
    cluster.wait([worker.barrier(1) for worker in cluster.workers])
    for key in SIZES:
        for value in cluster.pull_all(key):
            if sync:
                assert set(value) == {100 + 4 * 5 * workers}, f"seed {seed}: {key!r}"
    cluster.wait([worker.barrier(2) for worker in cluster.workers])
    for key in SIZES:
        for value in cluster.pull_all(key):
            assert set(value) == {100 + 4 * 5 * workers}, f"seed {seed}: {key!r}"


UPDATES = pytest.mark.parametrize(
    ("sync", "rule"), [(True, "test"), (False, "test"), (True, "counting"), (False, "counting")]
)


@UPDATES
@pytest.mark.parametrize("seed", range(8))
def test_every_push_counts_once(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, sync: bool, rule: str, seed: int
) -> None:
    monkeypatch.setitem(optimizers._REGISTRY, "counting", Counting)
    run_updates(make_cluster, seed, sync, rule)


@pytest.mark.slow
@UPDATES
@pytest.mark.parametrize("seed", range(2000, 2000 + SEEDS // 4))
def test_every_push_counts_once_in_many_clusters(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, sync: bool, rule: str, seed: int
) -> None:
    monkeypatch.setitem(optimizers._REGISTRY, "counting", Counting)
    run_updates(make_cluster, seed, sync, rule)


# --- nobody waits for ever --------------------------------------------------------------------------------------------


def test_pipelined_rounds_of_one_key(make_cluster: MakeCluster) -> None:
    """Every push and pull is under way at once; each pull gives the value of its own round."""
    cluster = make_cluster(workers=2, servers=2)
    cluster.init("spread", np.zeros(300, np.float32))
    pulls: list[tuple[int, Any, Array]] = []
    for worker in cluster.workers:
        for number in range(1, 6):
            worker.push("spread", gradient(1, "spread", worker.rank, number))
            pulls.append((number, *worker.pull("spread")))
    cluster.wait([operation for _, operation, _ in pulls])
    for number, _, value in pulls:
        assert value.tobytes() == exact_sum(1, "spread", 2, number).tobytes()


def test_pull_that_waits_for_others_does_not_keep_the_credit_that_they_wait_for(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=2, servers=1, credit_bytes=1024)
    for key in ("x", "y"):
        cluster.init(key, np.zeros(300, np.float32))
    ones = np.ones(300, np.float32)

    def first(worker: Any) -> Iterator[Any]:
        worker.push("x", ones)
        waits = worker.pull("x")[0]
        yield worker.pull("y")[0]  # there already, but the pull of x holds the credit
        worker.push("y", ones)
        yield worker.pull("y")[0]
        yield waits

    def second(worker: Any) -> Iterator[Any]:
        worker.push("y", ones)
        yield worker.pull("y")[0]
        worker.push("x", ones)
        yield worker.pull("x")[0]

    cluster.run_programs([first(cluster.workers[0]), second(cluster.workers[1])], limit=5.0)


def test_opposite_orders_with_tiny_credits(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=2, servers=2, credit_bytes=1024)
    keys = [f"layer {number}" for number in range(20)]
    for key in keys:
        cluster.init(key, np.zeros(300, np.float32))

    def train(worker: Any) -> Iterator[Any]:
        for _ in range(3):
            pulls = []
            for key in keys if worker.rank else keys[::-1]:
                worker.push(key, np.ones(300, np.float32))
                pulls.append(worker.pull(key)[0])
            yield from pulls

    cluster.run_programs([train(worker) for worker in cluster.workers], limit=20.0)
    assert all((value == 2).all() for key in keys for value in cluster.pull_all(key))


def test_credits_bound_what_is_pushed_at_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=1, servers=1, credit_bytes=2048)
    cluster.init("w", np.zeros(64 * 40, np.float32))
    under_way: list[int] = []
    worker = cluster.workers[0]
    session = cluster.session(worker.name)
    plain = session.validate

    def watched() -> None:
        plain()
        under_way.append(session._lanes[0]._pushes.bytes)

    session.validate = watched
    cluster.wait([worker.push("w", np.zeros(64 * 40, np.float32))])
    assert max(under_way) == 2048
    assert under_way[-1] == 0


# --- asynchronous, and what is refused --------------------------------------------------------------------------------


def test_asynchronous_sgd_on_integers_is_exact(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(seed=3, workers=3, servers=2, faults=ROUGH, sync=False, timeout=200.0)
    cluster.set_optimizer("sgd", learning_rate=0.5)
    cluster.init("w", np.full(300, 1000, np.float32))

    def train(worker: Any) -> Iterator[Any]:
        for number in range(1, 11):
            worker.push("w", np.full(300, 2.0 * number * (worker.rank + 1), np.float32))
            yield worker.pull("w")[0]

    cluster.run_programs([train(worker) for worker in cluster.workers])
    for value in cluster.pull_all("w"):
        assert set(value) == {1000 - 55 * (1 + 2 + 3)}


def test_asynchronous_broadcast_of_another_shape(make_cluster: MakeCluster) -> None:
    """Later pushes waited for ever for earlier ones, which the new chunks had never seen."""
    cluster = make_cluster(workers=2, servers=2, sync=False)
    cluster.set_optimizer("test")
    cluster.init("w", np.zeros(10, np.float32))
    cluster.wait([worker.push("w", np.ones(10, np.float32)) for worker in cluster.workers])
    cluster.init("w", np.zeros(300, np.float32), epoch=2)
    cluster.wait([worker.push("w", np.ones(300, np.float32)) for worker in cluster.workers])
    cluster.pull_all("w")
    assert [set(value) for value in cluster.pull_all("w")] == [{2.0}] * 2


def test_asynchronous_push_without_optimizer_is_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=1, servers=1, sync=False)
    cluster.init("w", np.zeros(4, np.float32))
    with pytest.raises(ConfigError, match="call set_optimizer first"):
        cluster.wait([cluster.workers[0].push("w", np.ones(4, np.float32))])


@pytest.mark.parametrize("sync", [True, False])
def test_optimizer_does_not_update_integers(make_cluster: MakeCluster, sync: bool) -> None:
    cluster = make_cluster(workers=2, servers=2, sync=sync)
    cluster.set_optimizer("sgd")
    cluster.init("counter", np.full(100, 5, np.int32))
    cluster.wait([worker.push("counter", np.ones(100, np.int32)) for worker in cluster.workers])
    with pytest.raises(ArrayError, match="'counter' holds int32; optimizers need a floating point key"):
        cluster.pull_all("counter")
