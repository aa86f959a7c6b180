"""Schedules against MXNet 1.9.1's lr_scheduler, and their refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ParameterError, UnknownNameError
from kvstore.optimizer import make_spec, spec_from_json, spec_to_json
from kvstore.schedules import SCHEDULES, make_schedule

with np.load(Path(__file__).parent / "golden" / "optimizers.npz") as _file:
    RECORDED: list[tuple[str, dict[str, Any]]] = json.loads(str(_file["schedules"]))
    RATES = [_file[f"rates_{i}"] for i in range(len(RECORDED))]


@pytest.mark.parametrize("index", range(len(RECORDED)), ids=[f"{i}-{name}" for i, (name, _) in enumerate(RECORDED)])
def test_equals_mxnet(index: int) -> None:
    name, numbers = RECORDED[index]
    schedule = make_schedule({"name": name, **numbers})
    rates = [schedule.rate(0.1, update) for update in range(1, RATES[index].size + 1)]
    np.testing.assert_allclose(rates, RATES[index], rtol=1e-12, atol=1e-15)


def test_every_schedule_is_covered() -> None:
    assert {name for name, _ in RECORDED} | {"constant"} == set(SCHEDULES)


def test_constant_warms_up() -> None:
    schedule = make_schedule({"name": "constant", "warmup_steps": "4"})
    assert [schedule.rate(0.5, update) for update in (1, 2, 3, 4, 100)] == [0.125, 0.25, 0.375, 0.5, 0.5]


def test_far_updates_cost_nothing_and_stay_finite() -> None:
    assert make_schedule({"name": "factor", "step": 1, "factor": 0.5}).rate(1.0, 10**12) == 1e-8
    assert make_schedule({"name": "cosine", "max_update": 10, "final_lr": 0.25}).rate(1.0, 10**12) == 0.25


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"name": "factor"}, "step"),
        ({"name": "factor", "step": 0}, "step"),
        ({"name": "factor", "step": 3, "factor": 1.5}, "factor"),
        ({"name": "factor", "step": 3, "factr": 0.5}, "factr"),
        ({"name": "multi_factor", "step": []}, "step"),
        ({"name": "multi_factor", "step": [5, 5]}, "step"),
        ({"name": "poly", "max_update": 5, "warmup_steps": 5}, "max_update"),
        ({"name": "cosine", "max_update": 5, "final_lr": "nan"}, "final_lr"),
        ({"name": "constant", "warmup_mode": "cubic"}, "warmup_mode"),
    ],
)
def test_wrong_numbers_are_named(given: dict[str, object], parameter: str) -> None:
    with pytest.raises(ParameterError, match=parameter) as caught:
        make_schedule(given)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("given", [{"name": "cosin", "max_update": 5}, {"max_update": 5}])
def test_unknown_names_list_the_known(given: dict[str, object]) -> None:
    with pytest.raises(UnknownNameError, match="cosine"):
        make_schedule(given)


def test_a_schedule_crosses_the_wire_in_a_spec() -> None:
    spec = make_spec("sgd", learning_rate=1, schedule={"name": "multi_factor", "step": [2, 4], "factor": 0.5})
    assert spec_from_json(spec_to_json(spec)) == spec
