"""Whole clusters with codecs that encode whole keys, and with those whose pushes are increments of a kept sum."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.compression.codec import Context
from kvstore.compression.encoder import KeyEncoder
from kvstore.compression.registry import codec_named, parse_params
from kvstore.errors import ConfigError
from kvstore.memory_network import Faults

MakeCluster = Callable[..., Any]
Array = np.ndarray[Any, Any]

SHAPE = (20, 30)  # 10 chunks of 64 elements, the last one shorter
ROUGH = Faults(delay=(0.0002, 0.05), stall=0.02, stall_seconds=3.0, disconnect=0.01, duplicate=0.05)
SEEDS = 10 if os.environ.get("GRADKV_TEST_SIZE") == "small" else 40
LOW_RANK = {"type": "powersgd", "rank": "2"}
INCREMENTS = {"type": "ef21", "ratio": "0.1"}


def gradient(rank: int, number: int, shape: tuple[int, ...] = SHAPE) -> Array:
    return np.random.default_rng([rank, number]).standard_normal(shape).astype(np.float32)


class Model:
    """What the workers of a job must send, computed without a network."""

    def __init__(self, workers: int, shape: tuple[int, ...] = SHAPE) -> None:
        n = int(np.prod(shape))
        f4 = np.dtype(np.float32)
        self.encoders = [KeyEncoder("w", n, f4, rank=rank, chunk_elements=64, shape=shape) for rank in range(workers)]
        self.n = n

    def decoded(self, rank: int, value: Array, number: int, codec: dict[str, str]) -> Array:
        encoder = self.encoders[rank]
        out = np.zeros(self.n, np.float32)
        for chunk in encoder.encode(encoder.prepare(value, parse_params(codec, top_level=False), number)):
            context = Context("w", chunk.n, chunk.index, chunk.offset, rank=rank, round=number)
            codec_named(chunk.codec).decode_add(chunk.payload, out[chunk.offset : chunk.offset + chunk.n], context)
        return out


@pytest.mark.parametrize("servers", [1, 3])
def test_whole_keys_are_summed_at_their_home_and_pulled_by_chunks(make_cluster: MakeCluster, servers: int) -> None:
    cluster, model = make_cluster(workers=2, servers=servers), Model(2)
    cluster.init("w", np.zeros(SHAPE, np.float32), whole=True)
    for number in (1, 2, 3):
        expected = np.zeros(600, np.float32)
        for worker in cluster.workers[::-1]:
            cluster.wait([worker.push("w", gradient(worker.rank, number), **LOW_RANK)])
        for rank in range(2):
            expected += model.decoded(rank, gradient(rank, number), number, LOW_RANK)
        for value in cluster.pull_all("w"):
            assert np.allclose(value, expected, rtol=1e-6, atol=1e-6)
            assert value.any()


def test_a_whole_push_goes_with_pushes_of_chunks_and_the_order_of_arrival_plays_no_part(
    make_cluster: MakeCluster,
) -> None:
    found = set()
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        cluster = make_cluster(workers=3, servers=2)
        cluster.init("w", np.zeros(SHAPE, np.float32), whole=True)
        codecs: list[dict[str, str]] = [LOW_RANK, {}, {"type": "2bit", "threshold": "0.5"}]
        for rank in order:
            cluster.wait([cluster.workers[rank].push("w", gradient(rank, 1), **codecs[rank])])
        values = cluster.pull_all("w")
        found |= {value.tobytes() for value in values}
        model = Model(3)
        raw = {"type": "none"}
        expected = sum(model.decoded(rank, gradient(rank, 1), 1, codecs[rank] or raw) for rank in range(3))
        assert np.allclose(values[0], expected, rtol=1e-5, atol=1e-5)
    assert len(found) == 1


def test_a_change_of_codec_between_rounds_works_both_ways(make_cluster: MakeCluster) -> None:
    cluster, model = make_cluster(workers=2, servers=2), Model(2)
    cluster.init("w", np.zeros(SHAPE, np.float32), whole=True)
    for number, codec in enumerate([LOW_RANK, {"type": "2bit"}, INCREMENTS, LOW_RANK, {}, INCREMENTS], 1):
        cluster.wait([worker.push("w", gradient(worker.rank, number), **codec) for worker in cluster.workers])
        raw = {"type": "none"}
        expected = sum(model.decoded(rank, gradient(rank, number), number, codec or raw) for rank in range(2))
        # increments start from zero each time, so the first sum of them is what was sent
        assert np.allclose(cluster.pull_all("w")[1], expected, rtol=1e-5, atol=1e-5), codec


def test_a_spread_key_refuses_whole_pushes_by_name(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=1, servers=2)
    cluster.init("w", np.zeros(SHAPE, np.float32))
    (worker,) = cluster.workers
    with pytest.raises(ConfigError, match=r"key 'w' whole, as powersgd.*set_gradient_compression before init"):
        cluster.wait([worker.push("w", gradient(0, 1), **LOW_RANK)])
    worker.keys["w"].round = 0  # the refused push may come again, in chunks
    cluster.wait([worker.push("w", gradient(0, 1))])
    assert cluster.pull_all("w")[0].any()


def test_an_optimizer_updates_what_whole_pushes_sum_to(make_cluster: MakeCluster) -> None:
    cluster, model = make_cluster(workers=2, servers=2), Model(2)
    cluster.set_optimizer("sgd", learning_rate=0.5)
    cluster.init("w", np.ones(SHAPE, np.float32), whole=True)
    expected = np.ones(600, np.float32)
    for number in (1, 2):
        cluster.wait([worker.push("w", gradient(worker.rank, number), **LOW_RANK) for worker in cluster.workers])
        expected -= 0.5 * sum(model.decoded(rank, gradient(rank, number), number, LOW_RANK) for rank in range(2))
    assert np.allclose(cluster.pull_all("w")[0], expected, rtol=1e-5, atol=1e-5)


def test_asynchronous_whole_pushes_are_applied_one_by_one(make_cluster: MakeCluster) -> None:
    cluster, model = make_cluster(workers=2, servers=2, sync=False), Model(2)
    cluster.set_optimizer("sgd", learning_rate=1.0)
    cluster.init("w", np.zeros(SHAPE, np.float32), whole=True)
    expected = np.zeros(600, np.float32)
    for rank, number in ((0, 1), (0, 2), (1, 1), (0, 3)):
        cluster.wait([cluster.workers[rank].push("w", gradient(rank, number), **LOW_RANK)])
        expected -= model.decoded(rank, gradient(rank, number), number, LOW_RANK)
    assert np.allclose(cluster.pull_all("w")[0], expected, rtol=1e-5, atol=1e-5)


def test_servers_keep_the_sum_of_increments(make_cluster: MakeCluster) -> None:
    """EF21: each round's gradient is the sum of all that was ever sent, and comes near a gradient that stays."""
    cluster, model = make_cluster(workers=2, servers=3), Model(2)
    cluster.init("w", np.zeros(SHAPE, np.float32))
    kept = np.zeros(600, np.float32)
    steady = [gradient(rank, 0) for rank in range(2)]
    for number in range(1, 13):
        cluster.wait([worker.push("w", steady[worker.rank], **INCREMENTS) for worker in cluster.workers])
        for rank in range(2):
            kept += model.decoded(rank, steady[rank], number, INCREMENTS)
        assert np.allclose(cluster.pull_all("w")[0], kept, rtol=1e-5, atol=1e-5)
    assert np.allclose(kept, (steady[0] + steady[1]).reshape(-1), atol=1e-5)  # 12 rounds of a tenth are all of it


def test_the_mean_of_increments_does_not_touch_what_is_kept(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=2, servers=1, average=True)
    cluster.init("w", np.zeros(SHAPE, np.float32))
    for _ in range(12):
        cluster.wait([worker.push("w", np.ones(SHAPE, np.float32), **INCREMENTS) for worker in cluster.workers])
    assert np.allclose(cluster.pull_all("w")[0], 1)


def test_asynchronous_increments_are_kept_for_each_worker(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=2, servers=2, sync=False)
    cluster.set_optimizer("sgd", learning_rate=1.0)
    cluster.init("w", np.zeros(SHAPE, np.float32))
    models, expected = Model(2), np.zeros(600, np.float32)
    kept = [np.zeros(600, np.float32) for _ in range(2)]
    for rank, number in ((0, 1), (1, 1), (0, 2), (0, 3), (1, 2)):
        cluster.wait([cluster.workers[rank].push("w", gradient(rank, number), **INCREMENTS)])
        kept[rank] += models.decoded(rank, gradient(rank, number), number, INCREMENTS)
        expected -= kept[rank]
    assert np.allclose(cluster.pull_all("w")[0], expected, rtol=1e-5, atol=1e-5)


def test_broadcast_starts_increments_afresh(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=1, servers=2)
    (worker,) = cluster.workers
    cluster.init("w", np.zeros(SHAPE, np.float32))
    cluster.wait([worker.push("w", gradient(0, 1), **INCREMENTS)])
    cluster.init("w", np.zeros(SHAPE, np.float32), epoch=2)  # the new key has a new encoder, as after a broadcast
    cluster.wait([worker.push("w", gradient(0, 2), **INCREMENTS)])
    assert np.allclose(cluster.pull_all("w")[0], Model(1).decoded(0, gradient(0, 2), 2, INCREMENTS))


def life(worker: Any, codecs: list[dict[str, str]], found: list[tuple[int, Any, Array]]) -> Iterator[Any]:
    """Pushes all rounds without waiting for the pulls between them: each must see exactly its round."""
    for number, codec in enumerate(codecs, 1):
        pushed = worker.push("w", gradient(worker.rank, number), **codec)
        found.append((number, *worker.pull("w")))
        if number % 2:
            yield pushed
    for _, operation, _ in found:
        yield operation
        assert operation.error is None, operation.error


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_pull_sees_its_round_over_a_rough_network(make_cluster: MakeCluster, seed: int) -> None:
    workers, codecs = 1 + seed % 3, [LOW_RANK, {}, LOW_RANK, INCREMENTS, INCREMENTS, LOW_RANK]
    cluster = make_cluster(seed, workers, 1 + seed % 2, ROUGH, timeout=300.0)
    cluster.init("w", np.zeros(SHAPE, np.float32), whole=True)
    found: list[list[tuple[int, Any, Array]]] = [[] for _ in range(workers)]
    cluster.run_programs([life(worker, codecs, found[worker.rank]) for worker in cluster.workers], limit=2000.0)
    model, kept = Model(workers), np.zeros(600, np.float32)
    for position, codec in enumerate(codecs):
        number = position + 1
        parts = [
            model.decoded(rank, gradient(rank, number), number, codec or {"type": "none"}) for rank in range(workers)
        ]
        total = sum(parts)
        kept = kept + total if codec is INCREMENTS else np.zeros(600, np.float32)
        expected = kept if codec is INCREMENTS else total
        for rank in range(workers):
            assert np.allclose(found[rank][position][2], expected, rtol=1e-5, atol=1e-5), f"seed {seed}, round {number}"
