"""Asynchronous keys with bounded staleness, in whole clusters: who waits, what is dropped or scaled."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.errors import MismatchError, OperationTimeoutError
from kvstore.memory_network import Faults
from kvstore.on_stale import OnStale

MakeCluster = Callable[..., Any]
ONES = np.ones(100, np.float32)  # two chunks


def start(make_cluster: MakeCluster, seed: int = 0, workers: int = 2, **settings: Any) -> Any:
    cluster = make_cluster(seed, workers=workers, servers=2, sync=False, **settings)
    cluster.set_optimizer("sgd", learning_rate=1.0)
    cluster.init("w", np.zeros(100, np.float32))
    return cluster


def push(cluster: Any, rank: int, times: int = 1) -> None:
    for _ in range(times):
        cluster.wait([cluster.workers[rank].push("w", ONES)])


def histogram(cluster: Any) -> dict[int, int]:
    counts: dict[int, int] = {}
    for name in cluster.servers:
        for old, pushes in cluster.simulator.machine(name).shard.staleness.histogram():
            counts[old] = counts.get(old, 0) + pushes
    return counts


def test_the_fast_worker_waits_until_the_slowest_has_caught_up(make_cluster: MakeCluster) -> None:
    cluster = start(make_cluster, staleness=2)
    push(cluster, 0, 2)
    assert cluster.wait([cluster.workers[0].pull("w")[0]]) is None  # 2 rounds ahead of a worker that has pushed none
    push(cluster, 0)
    operation, value = cluster.workers[0].pull("w")
    cluster.simulator.run(20.0)
    assert not operation.done
    push(cluster, 1)
    cluster.wait([operation], limit=1.0)
    assert (value == -4).all()


def test_without_a_bound_nobody_waits(make_cluster: MakeCluster) -> None:
    cluster = start(make_cluster)
    push(cluster, 0, 9)
    operation, value = cluster.workers[0].pull("w")
    cluster.wait([operation], limit=1.0)
    assert (value == -9).all()


def test_who_left_or_was_lost_holds_nobody_up(make_cluster: MakeCluster) -> None:
    cluster = start(make_cluster, workers=3, staleness=1)
    cluster.workers[1].leave()
    cluster.simulator.kill("worker-2")
    push(cluster, 0, 3)
    operation, value = cluster.workers[0].pull("w")
    cluster.wait([operation])
    assert (value == -3).all()


def test_a_wait_that_ends_names_the_slow_ranks(make_cluster: MakeCluster) -> None:
    cluster = start(make_cluster, workers=3, staleness=1, timeout=10.0)
    push(cluster, 0, 3)
    push(cluster, 2, 2)
    with pytest.raises(
        OperationTimeoutError, match=r"rank 0 has pushed 3 times, rank 1 has pushed 0 times, allowed is 1"
    ):
        cluster.wait([cluster.workers[0].pull("w")[0]])


def test_drop_leaves_out_what_is_older_than_the_bound(make_cluster: MakeCluster) -> None:
    cluster = start(make_cluster, staleness=2, on_stale=OnStale.DROP)
    push(cluster, 0, 2)
    push(cluster, 1)  # 2 updates old
    assert (cluster.pull_all("w")[0] == -3).all()  # both have pulled: at 3 updates
    push(cluster, 0, 3)
    push(cluster, 1)  # 3 updates old
    assert (cluster.pull_all("w")[0] == -6).all()
    shards = [cluster.simulator.machine(name).shard for name in cluster.servers]
    assert sum(shard.staleness.dropped for shard in shards) == 2  # of both chunks
    assert histogram(cluster)[3] == 2


def test_scale_weakens_what_is_older_than_the_bound(make_cluster: MakeCluster) -> None:
    cluster = start(make_cluster, staleness=1, on_stale=OnStale.SCALE)
    push(cluster, 0, 2)  # the second one is 1 update old
    push(cluster, 1)  # 2 updates old: half of it counts
    assert (cluster.pull_all("w")[0] == -2.5).all()
    push(cluster, 1)
    assert (cluster.pull_all("w")[0] == -3.5).all()
    shards = [cluster.simulator.machine(name).shard for name in cluster.servers]
    assert sum(shard.staleness.scaled for shard in shards) == 2
    assert histogram(cluster) == {0: 4, 1: 2, 2: 2}


def test_ranks_must_agree_about_the_bound(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=2, servers=1, sync=False, staleness=3)
    cluster.wait([cluster.workers[0].init("w", ONES)])
    other = cluster.workers[1]
    object.__setattr__(cluster, "config", type(cluster.config)(**{**vars_of(cluster.config), "staleness": 4}))
    with pytest.raises(MismatchError, match=r"rank 1 created its store with staleness=4, rank 0 with staleness=3"):
        cluster.wait([other.init("w", ONES)])


def vars_of(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


@pytest.mark.parametrize("seed", range(20))
def test_no_worker_is_ever_further_ahead_and_all_come_to_the_end(make_cluster: MakeCluster, seed: int) -> None:
    chance = random.Random(seed)
    bound, workers, rounds = chance.randrange(4), chance.randint(2, 4), 12
    rough = Faults(delay=(0.0002, 0.05), stall=0.02, stall_seconds=3.0, disconnect=0.01, duplicate=0.05)
    cluster = make_cluster(seed, workers, 2, rough, False, staleness=bound, timeout=500.0)
    cluster.set_optimizer("sgd", learning_rate=1.0)
    cluster.init("w", np.zeros(100, np.float32))
    done = [0] * workers
    widest = 0

    def life(worker: Any) -> Iterator[Any]:
        nonlocal widest
        for number in range(1, rounds + 1):
            pushed = worker.push("w", ONES)
            done[worker.rank] = number
            yield pushed
            operation, _ = worker.pull("w")
            yield operation
            assert operation.error is None, operation.error
            widest = max(widest, number - min(done))

    cluster.run_programs([life(worker) for worker in cluster.workers], limit=3000.0)
    assert widest <= bound, f"seed {seed}"
    assert all((value == -rounds * workers).all() for value in cluster.pull_all("w"))
