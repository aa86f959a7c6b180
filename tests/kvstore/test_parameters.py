"""Conversion of names and values into a typed struct."""

from typing import Annotated

import msgspec
import numpy as np
import pytest
from msgspec import Meta

from kvstore.errors import ParameterError
from kvstore.parameters import convert_parameters


class Params(msgspec.Struct, frozen=True):
    steps: int
    rate: Annotated[float, Meta(ge=0)] = 0.5
    centered: bool = False
    limit: float | None = None


@pytest.mark.parametrize(
    "given",
    [
        {"steps": 3, "rate": 0.25, "centered": True, "limit": None},
        {"steps": "3", "rate": "0.25", "centered": "true", "limit": "null"},
        {"steps": np.int64(3), "rate": np.float32(0.25), "centered": np.bool_(True)},
    ],
)
def test_values_and_their_texts_are_the_same(given: dict[str, object]) -> None:
    assert convert_parameters(Params, given, "p") == Params(steps=3, rate=0.25, centered=True)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"steps": 1, "rate": "-1"}, "rate"),
        ({"steps": 1, "rate": float("nan")}, "rate"),
        ({"steps": 1, "rate": "inf"}, "rate"),
        ({"steps": 1, "rate": 1e39}, "rate"),
        ({"steps": 1, "limit": "infinity"}, "limit"),
        ({"steps": 1.5}, "steps"),
        ({"steps": "many"}, "steps"),
        ({"steps": [1]}, "steps"),
        ({"steps": 1, "centered": 3}, "centered"),
        ({}, "steps"),
    ],
)
def test_refusals_name_the_parameter(given: dict[str, object], name: str) -> None:
    with pytest.raises(ParameterError, match=name) as caught:
        convert_parameters(Params, given, "p")
    assert caught.value.parameter == name


def test_a_misspelt_name_gets_the_nearest_first() -> None:
    with pytest.raises(ParameterError, match="no parameter 'rat'; it takes rate, "):
        convert_parameters(Params, {"steps": 1, "rat": 1}, "p")
