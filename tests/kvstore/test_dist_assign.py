"""How keys come to be on several servers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from kvstore.dist import DistStore
from kvstore.errors import ArrayError

MakeJob = Callable[..., Any]


def test_values_of_rank_0_reach_everybody_in_several_messages(make_job: MakeJob) -> None:
    job = make_job(2, 3, chunk_elements=64, message_bytes=1024)
    values = np.arange(20_000, dtype=np.float32)

    def work(store: DistStore) -> Any:
        store.init(["large", "empty"], [values * (1 - store.rank), np.empty((0, 3), np.int32)])
        return store.pull(["large", "empty"])

    for large, empty in job.parallel(work):
        np.testing.assert_array_equal(large, values)
        assert empty.shape == (0, 3) and empty.dtype == np.int32


def test_another_shape_or_dtype_is_refused_on_that_rank(make_job: MakeJob) -> None:
    job = make_job(3)

    def work(store: DistStore) -> None:
        store.init("w", np.zeros((4, store.rank + 1) if store.rank < 2 else (4, 1), np.float32))

    errors = job.errors(work)
    assert errors[0] is None and errors[2] is None
    assert isinstance(errors[1], ArrayError)
    assert (errors[1].key, errors[1].rank) == ("w", 1)
    assert "(4, 2)" in errors[1].text and "(4, 1)" in errors[1].text


def test_a_rank_waits_for_rank_0(make_job: MakeJob) -> None:
    first, second = make_job(2, 2).stores
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.init, "w", np.zeros(3, np.float32))
        assert wait([waiting], 0.3).not_done, "rank 1 did not wait"
        first.init("w", np.full(3, 7, np.float32))
        waiting.result(30)
    np.testing.assert_array_equal(second.pull("w"), np.full(3, 7.0))
