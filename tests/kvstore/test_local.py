"""The stores of one process, call by call."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.dtypes import DTYPES
from kvstore.errors import (
    ArrayError,
    ClosedError,
    ConfigError,
    KeyExistsError,
    KeyNotInitializedError,
    NotSupportedError,
    ParameterError,
    ServerError,
    UnknownNameError,
)
from kvstore.local import LocalStore
from kvstore.optimizer import Optimizer, OptimizerParams
from kvstore.store import KVStore

TWO_BIT = {"type": "2bit", "threshold": "0.5"}


@pytest.fixture(params=["local", "device"])
def kv(request: pytest.FixtureRequest) -> LocalStore:
    return LocalStore(request.param)


def full(value: float, n: int = 3) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full(n, value, np.float32)


# --- who am I -----------------------------------------------------------------------------------------------------


def test_a_local_store_is_rank_0_of_1(kv: LocalStore) -> None:
    assert isinstance(kv, KVStore)
    assert (kv.rank, kv.num_workers, kv.num_dead_node(), kv.num_dead_node("server", 5.0)) == (0, 1, 0, 0)
    assert kv.type in repr(kv)
    kv.barrier()


def test_unknown_kinds_and_roles_are_refused(kv: LocalStore) -> None:
    with pytest.raises(UnknownNameError, match="'local' and 'device'"):
        LocalStore("remote")
    with pytest.raises(ParameterError, match="scheduler, server, worker"):
        kv.num_dead_node("boss")


def test_capabilities() -> None:
    for name in ("optimizer", "Updater", "asynchronous"):
        assert LocalStore("local").is_capable(name)
    assert LocalStore("device").is_capable("compression")
    assert not LocalStore("local").is_capable("compression")
    assert not LocalStore("device").is_capable("telepathy")


def test_a_closed_store_refuses_everything_but_close(tmp_path: Any) -> None:
    with LocalStore("device") as kv:
        kv.init("w", full(1))
    kv.close()
    for call in (
        lambda: kv.init("v", full(1)),
        lambda: kv.push("w", full(1)),
        lambda: kv.pull("w"),
        lambda: kv.pushpull("w", full(1)),
        lambda: kv.broadcast("w", full(1)),
        lambda: kv.set_optimizer("sgd"),
        lambda: kv.set_learning_rate(1.0),
        lambda: kv.set_updater(None),
        lambda: kv.set_gradient_compression(TWO_BIT),
        lambda: kv.clear_gradient_compression(),
        lambda: kv.barrier(),
        lambda: kv.stats(),
        lambda: kv.save(tmp_path / "x"),
        lambda: kv.load(tmp_path / "x"),
        lambda: kv.save_optimizer_states(tmp_path / "x"),
        lambda: kv.load_optimizer_states(tmp_path / "x"),
        lambda: kv.push_async("w", full(1)).wait(),
    ):
        with pytest.raises(ClosedError):
            call()


# --- values -------------------------------------------------------------------------------------------------------


def test_a_push_replaces_the_value_by_the_sum_of_the_list(kv: LocalStore) -> None:
    kv.init("w", full(7))
    kv.push("w", [full(1), full(2), full(4)])
    assert kv.pull("w").tolist() == [7, 7, 7]
    kv.push("w", full(2))
    assert kv.pull("w").tolist() == [2, 2, 2]


def test_results_mirror_keys(kv: LocalStore) -> None:
    kv.init(["a", 3], [full(1), full(2)])
    kv.init({"b": full(3)})
    assert [x[0] for x in kv.pull(["a", 3, "b"])] == [1, 2, 3]
    pulled = kv.pushpull({"a": full(4), 3: [full(5), full(1)]})
    assert {key: x[0] for key, x in pulled.items()} == {"a": 4, 3: 6}
    out: dict[int | str, Any] = {"a": full(0), 3: full(0)}
    assert kv.pull(out) is out
    assert (out["a"][0], out[3][0]) == (4, 6)


def test_every_out_of_a_list_gets_the_value(kv: LocalStore) -> None:
    kv.init("w", full(0))
    outs = [full(9), full(9)]
    assert kv.pushpull("w", [full(1), full(2)], out=outs) is outs
    assert [out.tolist() for out in outs] == [[3, 3, 3], [3, 3, 3]]
    grad = full(5)
    kv.pushpull("w", grad, out=grad)
    assert kv.pull("w").tolist() == grad.tolist() == [5, 5, 5]


def test_nothing_is_aliased(kv: LocalStore) -> None:
    value, gradient = full(1), full(2)
    kv.init("w", value)
    value[:] = 9
    assert kv.pull("w").tolist() == [1, 1, 1]
    kv.push("w", gradient)
    gradient[:] = 9
    first = kv.pull("w")
    first[:] = 9
    assert kv.pull("w").tolist() == [2, 2, 2]
    assert first.flags.writeable


def test_numbers_take_the_type_of_the_key(kv: LocalStore) -> None:
    kv.init("loss", np.float32(0))
    kv.push("loss", 2)
    pulled = kv.pull("loss")
    assert (pulled.dtype, pulled.shape, float(pulled)) == (np.float32, (), 2.0)


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_is_kept(kv: LocalStore, name: str) -> None:
    kv.init("w", np.zeros((2, 2), DTYPES[name]))
    pulled = kv.pushpull("w", [np.ones((2, 2), DTYPES[name])] * 2)
    assert (pulled.dtype.name, pulled.shape) == (name, (2, 2))
    assert pulled.astype(float).tolist() == np.full((2, 2), 1.0 if name == "bool" else 2.0).tolist()


def test_half_precision_has_a_float32_master(kv: LocalStore) -> None:
    kv.set_optimizer("test")  # value += gradient
    kv.init("w", np.ones(1, np.float16))
    for _ in range(4):
        kv.push("w", np.full(1, 2.0**-12, np.float16))
    assert kv.pull("w").tolist() == [1.0 + 2.0**-10]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda kv: kv.push(["w", "nobody"], [full(9), full(9)]), KeyNotInitializedError),
        (lambda kv: kv.push(["w", "v"], [full(9), full(9, 4)]), ArrayError),
        (lambda kv: kv.push(["w", "v"], [full(9), [full(9), np.ones(3)]]), ArrayError),
        (lambda kv: kv.push(["w", "w"], [full(9), full(9)]), ParameterError),
        (lambda kv: kv.push(["w", "v"], [full(9)]), ArrayError),
        (lambda kv: kv.push(["w", True], [full(9), full(9)]), ParameterError),
        (lambda kv: kv.pushpull("w", full(9), out=full(0, 4)), ArrayError),
        (lambda kv: kv.pushpull("w", full(9), out=np.broadcast_to(full(0, 1), 3)), ArrayError),
        (lambda kv: kv.init(["x", "w"], [full(9), full(9)]), KeyExistsError),
        (lambda kv: kv.init(["x", "y"], [full(9), "text"]), ArrayError),
        (lambda kv: kv.init("x", [full(9), full(9)]), ArrayError),
        (lambda kv: kv.broadcast(["w", "v"], [full(9), None]), ArrayError),
        (lambda kv: kv.broadcast("w", full(9, 4), out=full(0)), ArrayError),
    ],
)
def test_a_refused_call_changes_nothing(kv: LocalStore, call: Callable[[LocalStore], Any], error: type) -> None:
    kv.init(["w", "v"], [full(1), full(2)])
    with pytest.raises(error):
        call(kv)
    assert [x.tolist() for x in kv.pull(["w", "v"])] == [[1, 1, 1], [2, 2, 2]]
    with pytest.raises(KeyNotInitializedError):
        kv.pull("x")


def test_a_missing_key_is_named_with_its_twin(kv: LocalStore) -> None:
    kv.init(3, full(1))
    with pytest.raises(KeyNotInitializedError, match=r"key '3' is not initialised.*there is a key 3, ") as caught:
        kv.pull("3")
    assert caught.value.key == "3"


def test_broadcast_creates_overwrites_and_may_reshape(kv: LocalStore) -> None:
    assert kv.broadcast("w", full(1)).tolist() == [1, 1, 1]
    out = full(0)
    kv.broadcast("w", full(2), out=out)
    assert out.tolist() == [2, 2, 2]
    assert kv.broadcast("w", np.ones((2, 2), np.int8)).dtype == np.int8
    kv.push("w", np.full((2, 2), 3, np.int8))
    assert kv.pull("w").tolist() == [[3, 3], [3, 3]]


def test_asynchronous_calls_are_done_at_once(kv: LocalStore) -> None:
    kv.init("w", full(0))
    handle = kv.pushpull_async("w", full(2))
    assert handle.done()
    assert handle.wait(0).tolist() == kv.pull_async("w").wait().tolist() == [2, 2, 2]
    assert kv.push_async("w", full(3)).wait() is None
    failed = kv.push_async(["nobody"], [full(1)])
    assert failed.done()
    with pytest.raises(KeyNotInitializedError):
        failed.wait()


def test_sparse_calls_are_not_supported(kv: LocalStore) -> None:
    class RowSparse:
        indices, values = np.array([0]), np.ones((1, 3), np.float32)

    kv.init("w", full(1))
    with pytest.raises(NotSupportedError, match="pull the whole key"):
        kv.row_sparse_pull("w", row_ids=[0])
    with pytest.raises(NotSupportedError, match="RowSparse"):
        kv.push("w", RowSparse())
    assert kv.pull("w").tolist() == [1, 1, 1]


# --- updates ------------------------------------------------------------------------------------------------------


def test_an_optimizer_updates_by_the_sum(kv: LocalStore) -> None:
    kv.init("w", full(1))
    kv.set_optimizer("sgd", learning_rate=0.5, wd=0.0)
    kv.push("w", [full(1), full(3)])
    assert kv.pull("w").tolist() == [-1, -1, -1]
    kv.set_learning_rate(0.25)
    kv.push("w", full(4))
    assert kv.pull("w").tolist() == [-2, -2, -2]
    kv.set_learning_rate(multipliers={"w": 0.0})
    kv.push("w", full(4))
    assert kv.pull("w").tolist() == [-2, -2, -2]


def test_momentum_is_kept_until_broadcast_or_set_optimizer(kv: LocalStore) -> None:
    settings = {"learning_rate": 1.0, "momentum": 0.5, "wd": 0.0}
    kv.init("w", full(0))
    kv.set_optimizer("sgd", **settings)
    kv.push("w", full(1))
    kv.push("w", full(1))
    assert kv.pull("w").tolist() == [-2.5] * 3
    kv.broadcast("w", full(0))
    kv.push("w", full(1))
    assert kv.pull("w").tolist() == [-1] * 3
    kv.set_optimizer("sgd", **settings)
    kv.push("w", full(1))
    assert kv.pull("w").tolist() == [-2] * 3


def test_wrong_optimizers_change_nothing(kv: LocalStore) -> None:
    kv.init(["w", "n"], [full(0), np.zeros(3, np.int32)])
    kv.set_optimizer("sgd", learning_rate=1.0, wd=0.0)
    with pytest.raises(UnknownNameError, match="sgd"):
        kv.set_optimizer("sdg")
    with pytest.raises(ParameterError, match="momentun"):
        kv.set_optimizer("sgd", momentun=0.9)
    with pytest.raises(ParameterError):
        kv.set_learning_rate(float("nan"))
    with pytest.raises(ArrayError, match="int32"):
        kv.push(["w", "n"], [full(1), np.ones(3, np.int32)])
    kv.push("w", full(1))
    assert kv.pull("w").tolist() == [-1, -1, -1]


def test_calls_that_need_an_optimizer_say_so(kv: LocalStore, tmp_path: Any) -> None:
    calls: list[Callable[[], None]] = [
        lambda: kv.set_learning_rate(0.1),
        lambda: kv.save_optimizer_states(tmp_path / "states"),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="set_optimizer"):
            call()


class Broken(Optimizer[OptimizerParams]):
    """A rule that returns a wrong shape."""

    def create_state(self, n: int, dtype: np.dtype[Any]) -> dict[str, Any]:
        return {}

    def update(self, key: Any, shape: Any, offset: int, value: Any, grad: Any, state: Any, step: int) -> Any:
        return value[:1]


def test_a_broken_rule_leaves_the_value(kv: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kv.init("w", full(1))
    kv.set_optimizer("test")
    assert kv._optimizer is not None
    monkeypatch.setattr(kv, "_optimizer", (kv._optimizer[0], Broken(OptimizerParams(), kv._optimizer[0])))
    with pytest.raises(ServerError, match="'w'"):
        kv.push("w", full(1))
    assert kv.pull("w").tolist() == [1, 1, 1]


def test_an_updater_changes_the_value_in_place(kv: LocalStore) -> None:
    seen = []

    def updater(key: Any, gradient: Any, value: Any) -> None:
        seen.append((key, gradient.shape, value.shape, value))
        value += 2 * gradient

    kv.init("w", np.ones((2, 3), np.float32))
    kv.set_optimizer("sgd")
    kv.set_updater(updater)
    kv.push("w", [np.ones((2, 3), np.float32)] * 2)
    assert kv.pull("w").tolist() == np.full((2, 3), 5).tolist()
    assert seen[0][:3] == ("w", (2, 3), (2, 3))
    seen[0][3][:] = 9  # it was kept, which must do no harm
    assert kv.pull("w").tolist() == np.full((2, 3), 5).tolist()
    kv.set_updater(None)
    kv.push("w", np.ones((2, 3), np.float32))
    assert kv.pull("w").tolist() == np.ones((2, 3)).tolist()


def test_a_failing_updater_leaves_the_value(kv: LocalStore) -> None:
    def updater(key: Any, gradient: Any, value: Any) -> None:
        value[:] = 9
        raise RuntimeError("no")

    kv.init("w", full(1))
    kv.set_updater(updater)
    with pytest.raises(RuntimeError, match="no"):
        kv.push("w", full(1))
    assert kv.pull("w").tolist() == [1, 1, 1]
    with pytest.raises(ParameterError, match="function"):
        kv.set_updater("sgd")  # type: ignore[arg-type]
