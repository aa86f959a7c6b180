"""The distributed store's calls against a job in this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.checkpoint import read_checkpoint
from kvstore.dist import DistStore
from kvstore.errors import (
    ArrayError,
    ClosedError,
    ConfigError,
    KeyExistsError,
    KeyNotInitializedError,
    KVStoreError,
    MismatchError,
    NonFiniteError,
    NotSupportedError,
    ParameterError,
    PeerLeftError,
)

MakeJob = Callable[..., Any]


def test_push_pull_and_identity(make_job: MakeJob) -> None:
    job = make_job(2, 2)

    def work(store: DistStore) -> Any:
        store.init("w", np.full((3, 2), 7, np.float32) if store.rank == 0 else np.zeros((3, 2), np.float32))
        first = store.pull("w")
        store.push("w", np.full((3, 2), store.rank + 1, np.float32))
        return store.rank, store.num_workers, store.type, first, store.pull("w")

    for rank, result in enumerate(job.parallel(work)):
        assert result[:3] == (rank, 2, "dist_sync")
        np.testing.assert_array_equal(result[3], np.full((3, 2), 7, np.float32))
        np.testing.assert_array_equal(result[4], np.full((3, 2), 3, np.float32))


def test_chunks_travel_in_place_into_out(make_job: MakeJob) -> None:
    store = make_job(1, 3, chunk_elements=64).stores[0]
    values = np.arange(1000, dtype=np.float32)
    store.init("w", np.zeros(1000, np.float32))
    gradient = values.copy()
    assert store.pushpull("w", gradient, out=gradient) is gradient
    np.testing.assert_array_equal(gradient, values)
    strided = np.full((1000, 2), -1, np.float32)
    store.pull("w", out=strided[:, 0])
    np.testing.assert_array_equal(strided[:, 0], values)
    assert (strided[:, 1] == -1).all()


def test_results_mirror_the_call(make_job: MakeJob) -> None:
    store = make_job().stores[0]
    one, two = np.ones(2, np.float32), np.full((), 2, np.float64)
    store.init({"a": one, 5: two})
    assert store.pull(5) == 2.0 and store.pull(5).dtype == np.float64 and store.pull(5).shape == ()
    listed = store.pull(["a", 5])
    np.testing.assert_array_equal(listed[0], one)
    assert listed[1] == 2.0
    outs = {"a": np.zeros(2, np.float32), 5: np.zeros((), np.float64)}
    assert store.pull(outs, out=outs) is outs
    assert outs[5] == 2.0
    both = [np.zeros(2, np.float32), np.zeros(2, np.float32)]
    store.pull("a", out=both)
    np.testing.assert_array_equal(both, [[1, 1], [1, 1]])


def test_asynchronous_calls_overlap_and_end(make_job: MakeJob) -> None:
    store = make_job(1, 2, chunk_elements=64).stores[0]
    keys = list(range(20))
    store.init(keys, [np.zeros(100, np.float32) for _ in keys])
    pushed = [store.push_async(key, np.full(100, key, np.float32), priority=-key) for key in keys]
    pulled = [store.pull_async(key, priority=-key) for key in keys]
    both = [store.pushpull_async(key, np.full(100, key + 1, np.float32)) for key in keys]
    for key in keys:
        pushed[key].wait(10)
        assert (pulled[key].wait(10) == key).all()
        assert (both[key].wait(10) == key + 1).all()
        assert both[key].done()


def test_asynchronous_calls_of_two_ranks_in_opposite_orders(make_job: MakeJob) -> None:
    """None of rank 0's calls can end before rank 1 has made its own: all are under way at once."""
    job = make_job(2, 2, chunk_elements=64)
    keys = list(range(20))
    job.parallel(lambda store: store.init(keys, [np.zeros(100, np.float32) for _ in keys]))
    first = [job.stores[0].pushpull_async(key, np.full(100, key, np.float32)) for key in keys]
    assert not any(handle.done() for handle in first)
    second = [job.stores[1].pushpull_async(key, np.full(100, key, np.float32)) for key in reversed(keys)]
    for handles in (first, second[::-1]):
        for key, handle in zip(keys, handles, strict=True):
            assert (handle.wait(30) == 2 * key).all()


def test_mistakes_change_nothing(make_job: MakeJob) -> None:
    store = make_job().stores[0]
    store.init("w", np.ones(4, np.float32))
    with pytest.raises(KeyExistsError, match="'w'"):
        store.init("w", np.zeros(4, np.float32))
    with pytest.raises(KeyNotInitializedError, match="'v'"):
        store.push("v", np.ones(4, np.float32))
    with pytest.raises(KeyNotInitializedError, match="'v'"):
        store.pull("v")
    for wrong in (np.ones(5, np.float32), np.ones(4, np.float64), np.ones((2, 2), np.float32)):
        with pytest.raises(ArrayError, match="'w'"):
            store.push(["w"], [wrong])
        with pytest.raises(ArrayError, match="'w'"):
            store.pull("w", out=wrong)
    with pytest.raises(NotSupportedError, match="set_optimizer"):
        store.set_updater(None)
    with pytest.raises(NotSupportedError, match="row_sparse_pull"):
        store.row_sparse_pull("w", row_ids=[0])
    np.testing.assert_array_equal(store.pull("w"), np.ones(4))


def test_a_refused_gradient_leaves_its_round_open(make_job: MakeJob) -> None:
    job = make_job(2, 2, chunk_elements=64)
    job.parallel(lambda store: store.init(["w", "v"], [np.zeros(100, np.float32)] * 2))
    job.parallel(lambda store: store.set_gradient_compression({"type": "2bit", "threshold": "1"}))
    bad = np.ones(100, np.float32)
    bad[99] = np.nan
    with pytest.raises(NonFiniteError) as refused:
        job.stores[1].push(["w", "v"], [np.ones(100, np.float32), bad])
    assert (refused.value.key, refused.value.rank, refused.value.count) == ("v", 1, 1)
    with pytest.raises(NonFiniteError) as told:
        job.stores[0].pushpull(["w", "v"], [np.ones(100, np.float32)] * 2)
    assert (told.value.key, told.value.rank) == ("v", 1)
    job.stores[1].pushpull(["w", "v"], [np.ones(100, np.float32)] * 2)
    for values in job.parallel(lambda store: store.pull(["w", "v"])):
        assert (values[0] == 2).all() and (values[1] == 2).all()


def test_broadcast_overwrites_and_forgets(make_job: MakeJob) -> None:
    job = make_job(2)

    def work(store: DistStore) -> Any:
        store.init("w", np.zeros(2, np.float32))
        store.set_gradient_compression({"type": "2bit", "threshold": "1"})
        store.pushpull("w", np.full(2, 0.75, np.float32))
        mine = np.full((3,), 5 + store.rank, np.float64)
        new = store.broadcast("w", mine)
        return new, store.pushpull("w", np.full(3, 0.75, np.float64))

    for new, after in job.parallel(work):
        np.testing.assert_array_equal(new, np.full(3, 5.0))
        np.testing.assert_array_equal(after, np.zeros(3))  # 0.75 stays below the threshold: the residual was reset


@pytest.mark.parametrize("average", [False, True])
def test_sums_and_means(make_job: MakeJob, average: bool) -> None:
    job = make_job(3, average=average)

    def work(store: DistStore) -> Any:
        store.init("w", np.zeros(4, np.float32))
        return store.pushpull("w", [np.ones(4, np.float32), np.ones(4, np.float32)])

    for result in job.parallel(work):
        np.testing.assert_array_equal(result, np.full(4, 2.0 if average else 6.0))


def test_asynchronous_store_needs_an_optimizer(make_job: MakeJob) -> None:
    job = make_job(2, store="dist_async")
    job.parallel(lambda store: store.init("w", np.full(2, 100, np.float32)))
    for error in job.errors(lambda store: store.push("w", np.ones(2, np.float32))):
        assert isinstance(error, ConfigError) and "set_optimizer" in error.text
    job.parallel(lambda store: store.set_optimizer("sgd", learning_rate=1.0))

    def train(store: DistStore) -> None:
        for _ in range(10):
            store.push("w", np.ones(2, np.float32))
        store.barrier()

    job.parallel(train)
    for values in job.parallel(lambda store: store.pull("w")):
        np.testing.assert_array_equal(values, np.full(2, 80.0))


def test_close_leaves_and_says_so_to_the_others(make_job: MakeJob) -> None:
    job = make_job(2)
    job.parallel(lambda store: store.init("w", np.zeros(2, np.float32)))
    job.parallel(lambda store: store.pushpull("w", np.ones(2, np.float32)))
    job.stores[0].close()
    job.stores[0].close()
    with pytest.raises(ClosedError):
        job.stores[0].pull("w")
    with pytest.raises(PeerLeftError) as told:
        job.stores[1].pushpull("w", np.ones(2, np.float32))
    assert (told.value.rank, told.value.rounds) == (0, 1)
    assert job.stores[1].num_dead_node() == 0


def test_counters(make_job: MakeJob) -> None:
    store = make_job(1, 2, chunk_elements=64).stores[0]
    store.init("w", np.zeros(1024, np.float32))
    store.set_gradient_compression({"type": "2bit"})
    store.pushpull("w", np.ones(1024, np.float32))
    stats = store.stats()
    row = stats["keys"]["w"]
    assert (row["pushes"], row["pulls"], row["raw_bytes"], row["sent_bytes"]) == (1, 1, 4096, 256)
    assert sum(server["sent_bytes"] for server in stats["servers"].values()) == stats["total"]["sent_bytes"] == 256


def test_broadcast_waits_for_every_rank_and_compares_keys(make_job: MakeJob) -> None:
    job = make_job(2)
    job.parallel(lambda store: store.init(["w", "v"], [np.zeros(2, np.float32)] * 2))
    first, second = job.stores
    with ThreadPoolExecutor(1) as pool:
        broadcast = pool.submit(first.broadcast, "w", np.ones(2, np.float32))
        assert wait([broadcast], 0.3).not_done, "rank 0 did not wait"
        np.testing.assert_array_equal(second.pull("w"), np.zeros(2), err_msg="seen before this rank's broadcast")
        np.testing.assert_array_equal(second.broadcast("w", np.zeros(2, np.float32)), np.ones(2))
        np.testing.assert_array_equal(broadcast.result(), np.ones(2))
    errors = job.errors(lambda store: store.broadcast("wv"[store.rank], np.ones(2, np.float32)))
    assert all(isinstance(error, MismatchError) for error in errors), errors


def test_a_mapping_of_arrays_is_pulled_into(make_job: MakeJob) -> None:
    store = make_job().stores[0]
    store.init({"a": np.ones(2, np.float32), "b": np.full(3, 2, np.float32)})
    arrays = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}
    assert store.pull(arrays) is arrays
    np.testing.assert_array_equal(arrays["b"], np.full(3, 2.0))
    result = store.broadcast({"a": np.full(2, 5, np.float32)})
    np.testing.assert_array_equal(result["a"], np.full(2, 5.0))


def test_a_wrong_out_of_broadcast_changes_nothing(make_job: MakeJob) -> None:
    store = make_job().stores[0]
    store.init("w", np.ones(2, np.float32))
    out = np.zeros(2, np.float32)
    out.setflags(write=False)
    with pytest.raises(ArrayError, match="read-only"):
        store.broadcast("w", np.full(2, 9, np.float32), out=out)
    np.testing.assert_array_equal(store.pull("w"), np.ones(2))


def test_one_refused_chunk_does_not_take_other_keys_of_the_call_along(make_job: MakeJob) -> None:
    """Unsent chunks were dropped, and later rounds of their keys lacked them for ever."""
    job = make_job(2, credit_bytes=1024, message_bytes=1024, timeout=5.0)
    job.parallel(lambda store: store.init({"count": np.zeros(4, np.int32), "w": np.zeros(5000, np.float32)}))
    job.parallel(lambda store: store.set_optimizer("sgd", learning_rate=1.0))
    gradients = {"count": np.ones(4, np.int32), "w": np.ones(5000, np.float32)}
    for error in job.errors(lambda store: store.pushpull(gradients)):
        assert error is not None, "integers cannot be updated by an optimizer"
    for values in job.parallel(lambda store: store.pushpull("w", np.ones(5000, np.float32))):
        np.testing.assert_array_equal(values, np.full(5000, -4.0))


def test_many_long_names_in_one_call(make_job: MakeJob) -> None:
    """A text of over 64 KiB could not be read, and was taken for the end of the membership."""
    job = make_job(2)
    names = [f"{number:04d}{'x' * 60}" for number in range(1500)]
    job.parallel(lambda store: store.broadcast(names, [np.ones(1, np.float32)] * 1500))
    job.parallel(lambda store: store.set_optimizer("sgd", learning_rate=1.0, lr_mult=dict.fromkeys(names, 2.0)))
    for values in job.parallel(lambda store: store.pushpull(names[0], np.ones(1, np.float32))):
        np.testing.assert_array_equal(values, [-3.0])


def test_what_cannot_be_encoded_fails_alone(make_job: MakeJob) -> None:
    store = make_job().stores[0]
    store.init("w", np.ones(2, np.float32))
    store.set_optimizer("sgd")
    with pytest.raises(KVStoreError):
        store.set_learning_rate(multipliers={"\ud800": 1.0})
    np.testing.assert_array_equal(store.pull("w"), np.ones(2))


def test_errors_do_not_collect_tracebacks(make_job: MakeJob) -> None:
    store = make_job().stores[0]
    store.init("w", np.ones(2, np.float32))
    store._thread.machine.session.fail_all(KVStoreError("over"))
    lengths = []
    for _ in range(3):
        with pytest.raises(KVStoreError, match="over") as error:
            store.pull("w")
        lengths.append(len(error.traceback))
    assert lengths[0] == lengths[2]


def test_codec_for_an_integer_key_is_refused_before_anything_is_agreed(make_job: MakeJob) -> None:
    store = make_job().stores[0]
    store.init({"count": np.zeros(4, np.int32)})
    with pytest.raises(ParameterError, match="count"):
        store.set_gradient_compression({"type": "2bit"}, per_key={"count": {"type": "2bit"}})
    store.set_gradient_compression({"type": "2bit"})
    np.testing.assert_array_equal(store.pushpull("count", np.ones(4, np.int32)), np.ones(4))


def test_saving_waits_for_all_ranks(make_job: MakeJob, tmp_path: Path) -> None:
    """A file held some chunks before and some after a round."""
    job = make_job(2, 2, chunk_elements=64)
    job.parallel(lambda store: store.init("w", np.zeros(6400, np.float32)))

    def work(store: DistStore) -> None:
        store.push("w", np.ones(6400, np.float32))
        store.save(tmp_path / "file")
        store.pushpull("w", np.ones(6400, np.float32))

    for _ in range(5):
        job.parallel(work)
        assert len(np.unique(read_checkpoint(tmp_path / "file").values["w"])) == 1


def test_outs_that_share_memory_with_other_values_of_the_call(make_job: MakeJob) -> None:
    store = make_job(1, 2, chunk_elements=64, credit_bytes=1024, message_bytes=1024).stores[0]
    store.init(["a", "b", "c"], [np.zeros(5000, np.float32)] * 3)
    x, y = np.full(5000, 1, np.float32), np.full(5000, 10, np.float32)
    store.pushpull(["a", "b"], [x, y], out=[y, x])
    assert (y == 1).all() and (x == 10).all()
    buffer = np.arange(7000, dtype=np.float32)
    store.pushpull("c", buffer[:5000], out=buffer[2000:])
    np.testing.assert_array_equal(buffer[2000:], np.arange(5000))
    kind = np.zeros(5000, np.float32).view(np.recarray)
    assert (store.pull("c", out=kind) == np.arange(5000)).all(), "a subclass need not behave like an array"


def test_what_was_pushed_before_belongs_to_the_optimizer_before(make_job: MakeJob) -> None:
    job = make_job(2)
    job.parallel(lambda store: store.init("w", np.full(2, 100, np.float32)))

    def work(store: DistStore) -> Any:
        store.push("w", np.ones(2, np.float32))
        store.set_optimizer("test", rescale_grad=1.0)
        first = store.pull("w")
        return first, store.pushpull("w", np.ones(2, np.float32))

    for first, second in job.parallel(work):
        np.testing.assert_array_equal(first, [2.0, 2.0])
        np.testing.assert_array_equal(second, [4.0, 4.0])


def test_asynchronous_pushes_are_complete_at_barrier_and_close(make_job: MakeJob) -> None:
    job = make_job(2, store="dist_async", chunk_elements=64, credit_bytes=1024, message_bytes=1024)
    job.parallel(lambda store: store.set_optimizer("test", rescale_grad=1.0))
    job.parallel(lambda store: store.init("w", np.zeros(5000, np.float32)))

    def work(store: DistStore) -> Any:
        if store.rank == 0:
            store.push_async("w", np.ones(5000, np.float32))
        store.barrier()
        return store.pull("w")

    for values in job.parallel(work):
        np.testing.assert_array_equal(values, np.ones(5000))
    handle = job.stores[0].push_async("w", np.ones(5000, np.float32))
    job.stores[0].close()
    handle.wait(0)
    np.testing.assert_array_equal(job.stores[1].pull("w"), np.full(5000, 2.0))
