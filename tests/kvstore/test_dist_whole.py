"""Codecs of whole keys in jobs: where keys are placed, what is refused and what the refusal says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.compression.encoder import KeyEncoder
from kvstore.compression.powersgd import PowerSgdParams
from kvstore.dist import DistStore
from kvstore.dist_key import DistKey
from kvstore.dist_whole import check_placement, check_whole
from kvstore.errors import ConfigError

MakeJob = Callable[..., Any]
LOW_RANK = {"type": "powersgd", "rank": "2"}
SHAPES = {"matrix": (20, 30), "bias": (200,), "tiny": (2, 2), "tensor": (6, 3, 5, 5)}


def test_a_job_trains_with_it_and_what_is_no_matrix_stays_spread_or_raw(make_job: MakeJob) -> None:
    def work(store: DistStore) -> dict[str, Any]:
        store.set_gradient_compression(LOW_RANK)
        store.init({key: np.zeros(shape, np.float32) for key, shape in SHAPES.items()})
        gradients = {key: np.full(shape, store.rank + 1, np.float32) for key, shape in SHAPES.items()}
        result = dict(store.pushpull(gradients))  # all of rank 1, so they arrive whole
        result["sent"] = {key: counts["sent_bytes"] for key, counts in store.stats()["keys"].items()}
        return result

    for found in make_job(2, 2, chunk_elements=64).parallel(work):
        for key, shape in SHAPES.items():
            assert found[key].shape == shape
            assert np.allclose(found[key], 3, rtol=1e-5)
        assert found["sent"] == {"matrix": 4 * 2 * 50, "bias": 800, "tiny": 16, "tensor": 4 * 2 * (6 + 75)}


def test_a_switch_after_init_is_refused_with_what_to_do_and_may_be_exempted(make_job: MakeJob) -> None:
    def work(store: DistStore) -> None:
        store.init("matrix", np.zeros((20, 30), np.float32))
        with pytest.raises(
            ConfigError, match=r"'powersgd' encodes whole keys, but key 'matrix' .* before init, or give"
        ):
            store.set_gradient_compression(LOW_RANK)
        store.pushpull("matrix", np.ones((20, 30), np.float32))
        store.set_gradient_compression(LOW_RANK, per_key={"matrix": {"type": "none"}})
        store.init("later", np.zeros((20, 30), np.float32))
        for key in ("matrix", "later"):
            assert np.allclose(store.pushpull(key, np.ones((20, 30), np.float32)), 2, rtol=1e-5)

    make_job(2, 2, chunk_elements=64).parallel(work)


def test_with_one_server_a_switch_after_init_works_both_ways(make_job: MakeJob) -> None:
    def work(store: DistStore) -> None:
        store.init("matrix", np.zeros((20, 30), np.float32))
        for codec in (LOW_RANK, {"type": "2bit", "threshold": "1"}, LOW_RANK):
            store.set_gradient_compression(codec)
            assert np.allclose(store.pushpull("matrix", np.ones((20, 30), np.float32)), 2, rtol=1e-4)

    make_job(2, 1, chunk_elements=64).parallel(work)


def test_a_broadcast_of_another_shape_stays_whole(make_job: MakeJob) -> None:
    def work(store: DistStore) -> None:
        store.set_gradient_compression({**LOW_RANK, "min_elements": "100"})
        store.init("matrix", np.zeros((3, 4), np.float32))
        store.broadcast("matrix", np.zeros((20, 30), np.float32))
        assert np.allclose(store.pushpull("matrix", np.ones((20, 30), np.float32)), 2, rtol=1e-5)

    make_job(2, 3, chunk_elements=64).parallel(work)


class Limited:
    """Just what `check_whole` asks for."""

    def __init__(self, servers: int) -> None:
        self.key, self.servers, self.chunks = "w", set(range(servers)), range(10)


@pytest.mark.parametrize(
    ("servers", "limit", "text"), [(2, 10**6, "over 2 servers"), (1, 399, "CHUNK_ELEMENTS to at least 64")]
)
def test_a_push_that_cannot_be_is_refused_before_it_is_encoded(servers: int, limit: int, text: str) -> None:
    encoder = KeyEncoder("w", 600, np.dtype(np.float32), chunk_elements=64, shape=(20, 30))
    prepared = encoder.prepare(np.ones((20, 30), np.float32), PowerSgdParams())
    key: Any = Limited(servers)
    with pytest.raises(ConfigError, match=text):
        check_whole([(key, prepared)], limit)
    check_whole([(Limited(1), prepared)], 400)  # type: ignore[list-item]
    assert not encoder.residual


def test_integer_keys_and_raw_settings_are_placed_as_ever() -> None:
    from kvstore.arrays import describe
    from kvstore.compression.policy import CompressionPolicy

    policy = CompressionPolicy.parse(LOW_RANK, {"raw.*": {"type": "none"}})
    counts = DistKey("counts", describe(np.zeros(600, np.int64), "counts"), 64, 3, 0)
    exempt = DistKey("raw.w", describe(np.zeros(600, np.float32), "raw.w"), 64, 3, 0)
    check_placement(policy, [counts, exempt])
