"""Whose optimizer is installed when, and what the others' calls are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore import optimizer as optimizers
from kvstore.errors import (
    ConfigError,
    MismatchError,
    NotSupportedError,
    ParameterError,
    ProtocolError,
    UnknownNameError,
)
from kvstore.optimizer import make_spec, spec_to_json
from kvstore.server.optimizer_turns import OptimizerTurns
from kvstore.server.stored import StoredChunk, StoredKey
from kvstore.server.updates import Updates
from kvstore.update_rules import Sgd

SGD, ADAM = spec_to_json(make_spec("sgd", learning_rate=0.5)), spec_to_json(make_spec("adam"))


@pytest.fixture
def turns() -> OptimizerTurns:
    return OptimizerTurns(Updates(2))


def test_rank_0_installs_and_the_others_are_compared(turns: OptimizerTurns) -> None:
    assert not turns.offer(1, 1, SGD, {})
    assert turns.current is None
    assert turns.offer(0, 1, SGD, {})
    assert turns.offer(1, 1, SGD, {})
    assert turns.current == SGD
    with pytest.raises(MismatchError) as caught:
        turns.offer(1, 1, ADAM, {})
    assert caught.value.rank == 1
    assert "rank 1 gave" in caught.value.text


def test_each_call_has_its_turn(turns: OptimizerTurns) -> None:
    turns.offer(0, 1, SGD, {})
    turns.offer(0, 2, ADAM, {})
    assert turns.offer(1, 1, SGD, {}), "a late rank is compared with the call of its turn"
    assert turns.offer(1, 2, ADAM, {})
    assert turns.offer(0, 1, SGD, {}), "a repeated call installs nothing"
    assert turns.current == ADAM


def test_call_left_out_is_refused(turns: OptimizerTurns) -> None:
    with pytest.raises(ProtocolError, match="call 3 of rank 0 came after call 0"):
        turns.offer(0, 3, SGD, {})
    assert turns.current is None


def test_failed_call_fails_for_all_and_the_next_one_works(turns: OptimizerTurns) -> None:
    unknown = '{"name":"mine","params":{}}'
    for rank in (0, 1):
        with pytest.raises(UnknownNameError, match="mine"):
            turns.offer(rank, 1, unknown, {})
    with pytest.raises(ParameterError):
        turns.offer(0, 2, "no json", {})
    assert turns.offer(0, 3, SGD, {})


def test_turn_0_installs_what_a_checkpoint_holds(turns: OptimizerTurns) -> None:
    turns.offer(0, 1, SGD, {})
    assert turns.offer(0, 0, ADAM, {})
    assert turns.current == ADAM
    assert turns.offer(1, 1, SGD, {})
    assert not turns.offer(1, 0, ADAM, {})


def test_rule_that_needs_whole_arrays_refuses_spread_keys(
    turns: OptimizerTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(optimizers._REGISTRY, "whole", type("Whole", (Sgd,), {"whole": True}))
    stored = StoredKey("w", (100,), np.dtype(np.float32), 100, True, False, False, 2)
    value: Any = np.zeros(64, np.float32)
    stored.chunks[0] = StoredChunk("w", 0, 0, value, value)
    with pytest.raises(ConfigError, match=r"'whole' needs each array whole, but key 'w' .* call set_optimizer before"):
        turns.offer(0, 1, spec_to_json(make_spec("whole")), {"w": stored})
    assert turns.current is None


def test_learning_rate_changes_what_is_in_force(turns: OptimizerTurns) -> None:
    with pytest.raises(ConfigError, match="no optimizer is set"):
        turns.set_learning_rate(0.1, None)
    turns.offer(0, 1, SGD, {})
    turns.set_learning_rate(0.25, {"*.bias": 2.0})
    rule = turns._updates.optimizer
    assert rule is not None
    assert [rule.learning_rate(key, 1) for key in ("w", "a.bias")] == [0.25, 0.5]
    turns.set_learning_rate(None, {"w": 4.0})
    assert [turns._updates.optimizer.learning_rate(key, 1) for key in ("w", "a.bias")] == [1.0, 0.25]  # type: ignore[union-attr]
    with pytest.raises(ParameterError):
        turns.set_learning_rate(float("nan"), None)
    assert turns.offer(1, 1, SGD, {}), "others are compared with what was given, not with what is in force"


def test_schedule_decides_the_rate(turns: OptimizerTurns) -> None:
    schedule = {"name": "factor", "step": 10, "factor": 0.5}
    turns.offer(0, 1, spec_to_json(make_spec("sgd", schedule=schedule)), {})
    with pytest.raises(NotSupportedError, match="schedule"):
        turns.set_learning_rate(0.1, None)
