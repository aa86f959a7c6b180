"""What fits a store's keys and optimizer, and what the refusal of everything else says."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kvstore.checkpoint import Checkpoint
from kvstore.checkpoint_fit import (
    Extent,
    Installed,
    check_states,
    check_values,
    fill_encoder,
    optimizer_in,
    require_states,
)
from kvstore.compression.encoder import KeyEncoder
from kvstore.errors import CheckpointError, ConfigError
from kvstore.optimizer import Key, create_optimizer, make_spec, spec_to_json

F4 = np.dtype(np.float32)
OWN: dict[Key, Extent] = {"w": ((2, 3), F4), "h": ((4,), np.dtype(np.float16))}


def installed(name: str, **params: Any) -> Installed:
    spec = make_spec(name, **params)
    return spec, create_optimizer(spec)


def whole() -> Checkpoint:
    return Checkpoint(
        values={"w": np.zeros((2, 3), F4), "h": np.zeros(4, np.float16)},
        masters={"h": np.zeros(4, F4)},
        optimizer_name="nag",
        state={"w": {"momentum": np.zeros(6, F4)}, "h": {"momentum": np.zeros(4, F4)}},
        steps={"w": 1, "h": 1},
    )


def test_what_fits_passes() -> None:
    check_values("file", whole(), OWN)
    check_states("file", whole(), OWN, installed("nag", momentum=0.9))
    check_states("file", Checkpoint(), OWN, None)
    unused = Checkpoint(optimizer_name="adam", steps={"w": 0, "unknown here, but never updated": 0})
    check_states("file", unused, OWN, installed("adam"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"values": {"w": np.zeros((2, 3), F4)}}, "key 'h' is not in the file"),
        ({"values": {**whole().values, "v": np.zeros(1)}}, "key 'v' is not in this store: call init"),
        ({"values": {**whole().values, "w": np.zeros((3, 2), F4)}}, r"'w' has shape \(3, 2\) of float32 .*\(2, 3\)"),
        ({"values": {**whole().values, "w": np.zeros((2, 3))}}, "'w' .* of float64 there, .* of float32 here"),
        ({"masters": {"w": np.zeros((2, 3), F4)}}, "key 'w' of float32 has a master"),
        ({"masters": {"x": np.zeros(1, F4)}}, "key 'x' is not in the file"),
        ({"residuals": {"x": np.zeros(1, F4)}}, "key 'x' is not in the file"),
    ],
)
def test_values_that_do_not_fit(change: dict[str, Any], text: str) -> None:
    checkpoint = whole()
    for name, value in change.items():
        setattr(checkpoint, name, value)
    with pytest.raises(CheckpointError, match=f"file: .*{text}") as caught:
        check_values("file", checkpoint, OWN)
    assert caught.value.path == "file"


@pytest.mark.parametrize("here", [installed("sgd", momentum=0.9), installed("adam")], ids=["sgd", "adam"])
def test_state_of_another_optimizer_is_refused_also_where_its_arrays_would_fit(here: Installed) -> None:
    with pytest.raises(CheckpointError, match=rf"'nag', this store has '{here[0].name}': call set_optimizer\('nag'"):
        check_states("file", whole(), OWN, here)
    with pytest.raises(CheckpointError, match="'nag'"):
        check_states("file", Checkpoint(optimizer_name="nag"), OWN, here)


def test_state_without_an_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no optimizer is set: call set_optimizer\('nag'"):
        check_states("file", whole(), OWN, None)
    checkpoint = whole()
    checkpoint.optimizer_name = None
    with pytest.raises(CheckpointError, match="None"):
        check_states("file", checkpoint, OWN, installed("nag"))
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        require_states("file", checkpoint)
    require_states("file", whole())


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, r"the optimizer state \[\] of key 'w' .* keeps \[momentum \(6,\) of float32\]"),
        ({"momentum": np.zeros(5, F4)}, r"\[momentum \(5,\) of float32\]"),
        ({"momentum": np.zeros(6)}, r"\[momentum \(6,\) of float64\]"),
        ({"momentum": np.zeros(6, F4), "variance": np.zeros(6, F4)}, "variance"),
        ({"mean": np.zeros(6, F4)}, "mean"),
    ],
)
def test_state_arrays_that_do_not_fit(state: dict[str, Any], text: str) -> None:
    checkpoint = whole()
    checkpoint.state["w"] = state
    with pytest.raises(CheckpointError, match=text) as caught:
        check_states("file", checkpoint, OWN, installed("nag", momentum=0.9))
    assert (caught.value.path, caught.value.key) == ("file", "w")


def test_state_of_a_key_that_is_not_here() -> None:
    with pytest.raises(CheckpointError, match="'h', which is not initialised: init it first"):
        check_states("file", whole(), {"w": OWN["w"]}, installed("nag", momentum=0.9))


def test_the_optimizer_of_a_file() -> None:
    spec, rule = installed("adam", learning_rate=0.5)
    found = optimizer_in("file", Checkpoint(optimizer=json.loads(spec_to_json(spec))))
    assert found is not None and found[0] == spec and type(found[1]) is type(rule)
    assert optimizer_in("file", Checkpoint()) is None
    for wrong in ({"name": "nobodys", "params": {}}, {"name": "adam"}, {"name": "adam", "params": {"x": 1}}):
        with pytest.raises(CheckpointError, match="file holds an optimizer that cannot be used"):
            optimizer_in("file", Checkpoint(optimizer=wrong))


def test_encoders_are_filled_or_refused_by_path() -> None:
    filled = fill_encoder("file", KeyEncoder("w", 2, F4), {"residual": np.ones(2, F4)})
    assert filled.state()["residual"].tolist() == [1, 1]
    for wrong in (np.ones(3, F4), np.full(2, np.nan, F4)):
        with pytest.raises(CheckpointError, match="file: key 'w'") as caught:
            fill_encoder("file", KeyEncoder("w", 2, F4), {"residual": wrong})
        assert (caught.value.path, caught.value.key) == ("file", "w")
