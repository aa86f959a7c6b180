"""Compression between the devices of one process, and a real device."""

from typing import Any

import numpy as np
import pytest

from kvstore.dtypes import DTYPES
from kvstore.errors import NonFiniteError, NotSupportedError, ParameterError
from kvstore.local import LocalStore

TWO_BIT = {"type": "2bit", "threshold": "0.5"}


@pytest.fixture
def device() -> LocalStore:
    return LocalStore("device")


def full(value: float, n: int = 3) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full(n, value, np.float32)


def test_local_does_not_compress_and_goes_on() -> None:
    kv = LocalStore("local")
    kv.init("w", full(0))
    with pytest.raises(NotSupportedError, match="'device'"):
        kv.set_gradient_compression(TWO_BIT)
    with pytest.raises(NotSupportedError, match="'device'"):
        kv.clear_gradient_compression()
    assert kv.pushpull("w", full(0.25)).tolist() == [0.25] * 3


def test_every_position_of_the_list_has_a_residual_of_its_own(device: LocalStore) -> None:
    device.set_gradient_compression(TWO_BIT)
    device.init("w", full(0, 64))
    pushes = [(0.25, 0.5), (0.25, 0.0), (0.0, 0.5), (0.0, -2.25)]
    got = [device.pushpull("w", [full(a, 64), full(b, 64)])[0] for a, b in pushes]
    assert got == [0.5, 0.5, 0.5, -0.5]
    drained = [device.pushpull("w", [full(0, 64), full(0, 64)])[0] for _ in range(5)]
    assert drained == [-0.5, -0.5, -0.5, 0.0, 0.0]


def test_a_list_of_one_is_quantised_too(device: LocalStore) -> None:
    device.set_gradient_compression(TWO_BIT)
    device.init("w", full(0, 64))
    assert [device.pushpull("w", [full(0.25, 64)])[0] for _ in range(3)] == [0, 0.5, 0]
    assert [device.pushpull("w", full(0.25, 64))[0] for _ in range(2)] == [0.5, 0]


def test_many_positions_are_counted_and_rounded_once(device: LocalStore) -> None:
    device.set_gradient_compression({"type": "2bit", "threshold": 0.1})
    device.init("w", full(0, 64))
    total = device.pushpull("w", [full(0.1, 64)] * 10)
    assert set(total.tolist()) == {float(np.float32(10) * np.float32(0.1))}


def test_keys_of_several_chunks_are_summed_whole(device: LocalStore) -> None:
    n = 262_144 * 2 + 17
    random = np.random.default_rng(20250101)
    grads = [random.normal(size=n).astype(np.float32) for _ in range(3)]
    device.set_gradient_compression({"type": "2bit", "threshold": 1.0})
    device.init("w", np.zeros(n, np.float32))
    expected = sum(np.where(g >= 1, 1.0, np.where(g <= -1, -1.0, 0.0)) for g in grads)
    np.testing.assert_array_equal(device.pushpull("w", grads), expected)


def test_clearing_flushes_or_drops_the_residuals(device: LocalStore) -> None:
    device.init("w", full(0, 64))
    for flush, expected in ((True, 1.25), (False, 1.0)):
        device.set_gradient_compression(TWO_BIT)
        device.push("w", full(0.25, 64))
        device.clear_gradient_compression(flush=flush)
        assert device.pushpull("w", full(1, 64))[0] == expected
        assert device.pushpull("w", full(1, 64))[0] == 1.0


def test_another_setting_keeps_residuals_and_broadcast_drops_them(device: LocalStore) -> None:
    device.init("w", full(0, 64))
    device.set_gradient_compression(TWO_BIT)
    device.push("w", full(0.25, 64))
    device.set_gradient_compression({"type": "2bit", "threshold": 0.25})
    assert [device.pushpull("w", full(0, 64))[0] for _ in range(2)] == [0.25, 0]
    device.push("w", full(0.125, 64))
    device.broadcast("w", full(0, 64))
    assert device.pushpull("w", full(0.125, 64))[0] == 0


def test_patterns_and_integer_keys(device: LocalStore) -> None:
    device.init(["a.bias", "n"], [full(0, 64), np.zeros(64, np.int32)])
    device.set_gradient_compression(TWO_BIT, per_key={"*.bias": {"type": "none"}})
    assert device.pushpull("a.bias", full(0.25, 64))[0] == 0.25
    assert device.pushpull("n", np.full(64, 3, np.int32))[0] == 3
    with pytest.raises(ParameterError, match="'n'"):
        device.set_gradient_compression(TWO_BIT, per_key={"n": {"type": "2bit"}})
    device.set_gradient_compression(TWO_BIT, per_key={"m*": {"type": "2bit"}})
    with pytest.raises(ParameterError, match="'m1'"):
        device.init("m1", np.zeros(3, np.int8))


def test_a_non_finite_gradient_is_refused_before_anything_changes(device: LocalStore) -> None:
    device.set_gradient_compression(TWO_BIT)
    device.init(["v", "w"], [full(0, 64), full(0, 64)])
    device.push(["v", "w"], [full(0.25, 64), [full(0.25, 64), full(0.5, 64)]])
    bad = full(0.25, 64)
    bad[[3, 5]] = np.nan, np.inf
    with pytest.raises(NonFiniteError) as caught:
        device.push(["v", "w"], [full(0.25, 64), [full(0.25, 64), bad]])
    assert (caught.value.key, caught.value.rank, caught.value.count) == ("w", 0, 2)
    assert device.pull("w")[0] == 0.5
    assert [x[0] for x in device.pushpull(["v", "w"], [full(0.25, 64), [full(0.25, 64), full(0, 64)]])] == [0.5, 0.5]


def test_half_precision_is_quantised_in_float32(device: LocalStore) -> None:
    device.set_gradient_compression({"type": "2bit", "threshold": 0.1})
    for name in ("float16", "bfloat16", "float64"):
        device.init(name, np.zeros(64, DTYPES[name]))
        pulled = device.pushpull(name, [np.full(64, 0.25, DTYPES[name])] * 3)
        assert pulled.dtype.name == name
        assert pulled[0] == (np.float32(3) * np.float32(0.1)).astype(DTYPES[name])


def test_stats_count_bytes_and_calls(device: LocalStore) -> None:
    device.init(["v", "w"], [full(0, 1600), full(0, 1600)])
    device.push("w", [full(1, 1600)] * 2)
    device.set_gradient_compression(TWO_BIT)
    device.pushpull("w", [full(1, 1600)] * 2)
    stats = device.stats()
    counted = stats["keys"]["w"]
    assert (counted["pushes"], counted["pulls"], counted["raw_bytes"]) == (2, 1, 4 * 6400)
    assert counted["sent_bytes"] == 2 * 6400 + 2 * 400
    assert counted["encode_seconds"] > 0 and counted["decode_seconds"] > 0
    assert stats["total"]["raw_bytes"] == 4 * 6400
    assert stats["keys"]["v"]["pushes"] == 0
    assert stats["servers"] == {}


# --- a real device ------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy() -> Any:
    module = pytest.importorskip("cupy")
    try:
        module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError:
        pytest.skip("no CUDA device")
    return module


@pytest.mark.gpu
@pytest.mark.parametrize("compressed", [False, True])
def test_device_arrays_give_the_same_as_host_arrays_and_stay_there(cupy: Any, compressed: bool) -> None:
    random = np.random.default_rng(59)
    grads = [random.normal(size=(300, 1000)).astype(np.float32)[:, ::2] for _ in range(3)]
    stores = [LocalStore("device"), LocalStore("device")]
    for kv, make in zip(stores, (np.asarray, cupy.asarray), strict=True):
        if compressed:
            kv.set_gradient_compression(TWO_BIT)
        kv.init("w", make(np.zeros((300, 500), np.float32)))
    for _ in range(3):
        expected = stores[0].pushpull("w", grads)
        got = stores[1].pushpull("w", [cupy.asarray(grad) for grad in grads])
        assert isinstance(got, cupy.ndarray)
        assert isinstance(stores[1]._keys["w"].master, cupy.ndarray)
        np.testing.assert_array_equal(cupy.asnumpy(got), expected)
    out = cupy.zeros((300, 1000), np.float32)
    stores[1].pull("w", out=out[:, ::2])
    np.testing.assert_array_equal(cupy.asnumpy(out[:, ::2]), expected)
    assert not out[:, 1::2].any()


def test_increments_are_kept_until_the_list_or_the_codec_changes() -> None:
    """The sum holds a part of each position: with other positions, and after any other codec, all start afresh."""
    shape = (10, 10)
    with LocalStore("device") as store:
        store.init("w", np.zeros(shape, np.float32))
        store.set_gradient_compression({"type": "ef21", "ratio": 0.25})
        two, one = [np.full(shape, 2, np.float32), np.full(shape, 3, np.float32)], [np.full(shape, 7, np.float32)]
        first = store.pushpull("w", two)
        assert sorted(set(first.reshape(-1).tolist())) == [0, 5]
        for _ in range(3):
            last = store.pushpull("w", two)
        assert (last == 5).all()  # four quarters
        assert np.count_nonzero(store.pushpull("w", one) == 7) == 25  # nothing of the two is left
        store.clear_gradient_compression()
        assert (store.pushpull("w", one) == 7).all()
        store.set_gradient_compression({"type": "ef21", "ratio": 0.25})
        assert np.count_nonzero(store.pushpull("w", one) == 7) == 25
        store.set_gradient_compression({"type": "2bit", "threshold": 7})
        assert (store.pushpull("w", one) == 7).all()


def test_whole_keys_are_encoded_for_each_position() -> None:
    shape = (20, 30)
    with LocalStore("device") as store:
        store.set_gradient_compression({"type": "powersgd", "rank": 1})
        store.init("w", np.zeros(shape, np.float32))
        assert np.allclose(store.pushpull("w", [np.full(shape, 2, np.float32), np.full(shape, 3, np.float32)]), 5)
        assert store.stats()["total"]["sent_bytes"] == 2 * 4 * (20 + 30)
