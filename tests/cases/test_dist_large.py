"""What users of other stores ran into, over real processes: arrays past 2 GB and 2**31 elements."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import psutil
import pytest

import kvstore

NEEDED = 20 << 30
"""Bytes of free memory for the large arrays: two values on the servers, one of them twice on the worker, and room."""

LIMITS = {
    "KVSTORE_CHUNK_ELEMENTS": "64",
    "KVSTORE_MESSAGE_BYTES": "1024",
    "KVSTORE_CREDIT_BYTES": "4096",
    "KVSTORE_QUEUE_BYTES": "8192",
}


def pattern(size: int, dtype: str, seed: int) -> Any:
    """An array whose blocks of 2**20 elements all differ; small integers, so that sums are exact."""
    array = np.empty(size, dtype)
    base = np.random.default_rng(seed).integers(-30, 30, 1 << 20).astype(dtype)
    for number, start in enumerate(range(0, size, 1 << 20)):
        array[start : start + (1 << 20)] = np.roll(base, number)[: size - start]
    return array


def pushed_and_pulled(sizes: dict[str, int], workers: int) -> Any:
    """How many blocks of 2**20 elements differ from the sum of what the workers pushed."""
    found: dict[str, Any] = {}
    with kvstore.create("dist_sync") as kv:
        for dtype, size in sizes.items():
            kv.init(dtype, np.zeros(size, dtype))
            gradient = pattern(size, dtype, kv.rank)
            began = time.perf_counter()
            pulled = kv.pushpull(dtype, gradient)
            seconds = time.perf_counter() - began
            for rank in set(range(workers)) - {kv.rank}:
                gradient += pattern(size, dtype, rank)
            blocks = [slice(start, start + (1 << 20)) for start in range(0, size, 1 << 20)]
            wrong = sum(not np.array_equal(pulled[block], gradient[block]) for block in blocks)
            found[dtype] = {"wrong": wrong, "size": pulled.size, "last": pulled[-1000:].tolist(), "seconds": seconds}
            del gradient, pulled
        return found


def check(result: Any, sizes: dict[str, int], workers: int) -> None:
    for dtype, size in sizes.items():
        assert result[dtype]["wrong"] == 0 and result[dtype]["size"] == size, dtype
        start = (size - 1) >> 20 << 20  # of the last block, made here once more
        base = sum(np.random.default_rng(rank).integers(-30, 30, 1 << 20) for rank in range(workers))
        block = np.roll(base, start >> 20)[: size - start]
        assert result[dtype]["last"][-len(block) :] == block[-1000:].tolist(), dtype


@pytest.mark.parametrize("servers", [1, 2])
def test_r08_arrays_far_beyond_every_limit_of_a_message(run_job: Any, servers: int) -> None:
    sizes = {"int8": 200_016, "float32": 100_003}
    args = {"sizes": sizes, "workers": 2}
    for result in run_job(pushed_and_pulled, servers=servers, args=args, uses=[pattern], env=LIMITS).ok():
        check(result, sizes, 2)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
def test_r08_arrays_past_2_gb_and_31_bits(run_job: Any, servers: int) -> None:
    if os.environ.get("GRADKV_TEST_SIZE") == "small" or psutil.virtual_memory().available < NEEDED:
        pytest.skip("needs 20 GB of free memory, and GRADKV_TEST_SIZE other than small")
    sizes = {"int8": 2**31 + 16, "float32": 590_000_000}
    job = run_job(
        pushed_and_pulled, workers=1, servers=servers, args={"sizes": sizes, "workers": 1}, uses=[pattern],
        env={"KVSTORE_TIMEOUT": "200"}, timeout=400.0,
    )  # fmt: skip
    (result,) = job.ok()
    check(result, sizes, 1)
