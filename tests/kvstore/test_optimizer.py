"""Specs, the registry and the interface of update rules."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore import optimizer as module
from kvstore.errors import ConfigError, NotSupportedError, ParameterError, UnknownNameError
from kvstore.optimizer import (
    OPTIMIZERS,
    Array,
    Key,
    Optimizer,
    OptimizerParams,
    OptimizerSpec,
    create_optimizer,
    find_optimizer,
    make_spec,
    multiplier,
    register_optimizer,
    spec_from_json,
    spec_to_json,
    with_learning_rate,
)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The registry; what a test registers is forgotten after it."""
    before = dict(module._REGISTRY)
    yield module._REGISTRY
    module._REGISTRY.clear()
    module._REGISTRY.update(before)


def step(rule: Optimizer[Any], key: Key = "w", number: int = 1) -> float:
    """Return by how much a value of 0 moves under a gradient of 1."""
    zero, one = np.zeros(1, "f4"), np.ones(1, "f4")
    return float(rule.update(key, (1,), 0, zero, one, rule.create_state(1, zero.dtype), number)[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_built_in_survives_the_wire(name: str) -> None:
    spec = make_spec(name, rescale_grad="0.5", lr_mult={"a*": 2})
    assert spec_from_json(spec_to_json(spec)) == spec
    assert msgspec.json.decode(spec_to_json(spec))["params"]["rescale_grad"] == 0.5
    assert create_optimizer(spec).params.rescale_grad == 0.5


def test_text_and_numbers_give_the_same_spec() -> None:
    assert make_spec("SGD", learning_rate="0.1", momentum="0.9") == make_spec("sgd", learning_rate=0.1, momentum=0.9)


def test_a_spec_may_be_given_and_changed() -> None:
    spec = make_spec("adam", beta1=0.8, wd_mult={"b": 0})
    assert make_spec(spec) == spec
    changed = make_spec(spec, learning_rate=0.5)
    assert (changed.params["beta1"], changed.params["learning_rate"], changed.wd_mult) == (0.8, 0.5, {"b": 0.0})


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        ({"learning_rat": 0.1}, "learning_rat"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"rescale_grad": "-inf"}, "rescale_grad"),
        ({"momentum": 2}, "momentum"),
        ({"clip_gradient": 0}, "clip_gradient"),
        ({"lr_mult": {"w": "nan"}}, "w"),
        ({"wd_mult": {"w": -1}}, "w"),
        ({"schedule": {"name": "factor", "step": 1, "warmup_begin_lr": 1}}, "warmup_begin_lr"),
    ],
)
def test_wrong_parameters_are_named_before_anything_is_sent(params: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        make_spec("sgd", **params)
    assert caught.value.parameter == parameter
    assert parameter in str(caught.value)


def test_an_unknown_name_lists_the_nearest_and_says_how_to_register() -> None:
    with pytest.raises(
        UnknownNameError, match=r"known here: adam.*register_optimizer\('adm'\).*--import MODULE"
    ) as caught:
        make_spec("adm")
    assert caught.value.name == "adm"


def test_r28_a_server_refuses_what_it_does_not_know_and_checks_all_again() -> None:
    with pytest.raises(UnknownNameError, match="--import MODULE"):
        create_optimizer(OptimizerSpec(name="mine", params={}))
    with pytest.raises(ParameterError, match="learning_rate"):
        create_optimizer(OptimizerSpec(name="sgd", params={"learning_rate": float("inf")}))
    with pytest.raises(ParameterError, match="os"):
        create_optimizer(OptimizerSpec(name="sgd", params={"os": "system"}))


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"name": "sgd", "params": {}, "more": 1}', "[" * 100_000, b"\x80\x04."]
)
def test_what_is_no_spec_is_refused(text: str | bytes) -> None:
    with pytest.raises(ParameterError, match="no optimizer specification"):
        spec_from_json(text)


def test_r28_own_rule_with_own_parameters(registry: dict[str, Any]) -> None:
    class LarsParams(OptimizerParams, frozen=True, kw_only=True):
        eta: float = 0.5

    @register_optimizer("Lars")
    class Lars(Optimizer[LarsParams]):
        Params = LarsParams
        whole = True

        def create_state(self, n: int, dtype: np.dtype[Any]) -> dict[str, Array]:
            return {"seen": np.zeros(n, dtype)}

        def update(
            self, key: Key, shape: tuple[int, ...], offset: int, value: Array, grad: Array, state: Any, step: int
        ) -> Array:
            assert (shape, offset, value.shape) == ((4, 2), 0, (8,))
            state["seen"] += 1
            moved: Array = value - self.params.eta * self.learning_rate(key, step) * grad
            return moved

    rule = create_optimizer(spec_from_json(spec_to_json(make_spec("lars", learning_rate=0.5, eta="0.25"))))
    state = rule.create_state(8, np.dtype("f4"))
    new = rule.update("w", (4, 2), 0, np.ones(8, "f4"), np.ones(8, "f4"), state, 1)
    assert rule.whole
    assert new.tolist() == [0.875] * 8
    assert state["seen"].tolist() == [1] * 8
    assert find_optimizer("lars") is Lars


def test_names_are_registered_once(registry: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'SGD' is already registered"):
        register_optimizer("SGD")(type("Mine", (Optimizer,), {}))
    with pytest.raises(ConfigError, match="not a subclass"):
        register_optimizer("mine")(dict)  # type: ignore[type-var]
    with pytest.raises(TypeError):
        OPTIMIZERS["mine"] = "x:Y"  # type: ignore[index]


def test_rules_come_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        value = "kvstore.update_rules:Sgd"

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group, name: [Found] if name == "third" else [])
    assert find_optimizer("third") is find_optimizer("sgd")


@pytest.mark.parametrize(
    ("key", "factor"), [("a.bias", 2.0), ("a.weight", 3.0), ("a[0]", 5.0), (7, 4.0), ("7", 4.0), ("b", 1.0)]
)
def test_multipliers_exact_first_then_the_first_pattern(key: Key, factor: float) -> None:
    assert multiplier({"*.bias": 2, "a.*": 3, "7": 4, "*[0]": 6, "a[0]": 5}, key) == factor


def test_multipliers_reach_rate_and_decay() -> None:
    rule = create_optimizer(make_spec("sgd", learning_rate=0.5, wd=0.5, lr_mult={"*.bias": 0.5}, wd_mult={"w": 0}))
    assert (step(rule, "w"), step(rule, "a.bias")) == (-0.5, -0.25)
    assert (rule.weight_decay("w"), rule.weight_decay("a.bias")) == (0.0, 0.5)


def test_a_new_rate_replaces_the_old_one() -> None:
    spec = with_learning_rate(make_spec("sgd", learning_rate=1, lr_mult={"w": 0.5}), "0.5")
    assert step(create_optimizer(spec)) == -0.25
    assert step(create_optimizer(with_learning_rate(spec, lr_mult={}))) == -0.5
    with pytest.raises(ParameterError, match="learning_rate"):
        with_learning_rate(spec, -1)


def test_a_schedule_counts_updates_and_refuses_a_rate_by_hand() -> None:
    spec = make_spec("sgd", learning_rate=1, schedule={"name": "factor", "step": 2, "factor": 0.5})
    assert [step(create_optimizer(spec), number=n) for n in (1, 2, 3, 5)] == [-1, -1, -0.5, -0.25]
    with pytest.raises(NotSupportedError, match="set_optimizer without `schedule`"):
        with_learning_rate(spec, 0.1)


def test_an_optimizer_object_of_another_library_is_refused() -> None:
    with pytest.raises(ParameterError, match="named, not passed as a object"):
        make_spec(object())  # type: ignore[arg-type]
