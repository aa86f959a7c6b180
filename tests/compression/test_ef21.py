"""EF21, against the rule written out."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.compression.codec import Context
from kvstore.compression.ef21 import Ef21, Ef21Params
from kvstore.compression.encoder import KeyEncoder
from kvstore.compression.registry import parse_params
from kvstore.compression.sparse import select_top
from kvstore.errors import ParameterError

F4 = np.dtype(np.float32)


def test_it_sends_the_largest_of_the_change(rng: np.random.Generator) -> None:
    encoder, known = KeyEncoder("w", 100, F4), np.zeros(100, np.float32)
    for round in range(1, 20):
        g = rng.standard_normal(100).astype(np.float32)
        (chunk,) = encoder.encode(encoder.prepare(g, Ef21Params(ratio=0.1), round))
        change = g - known
        chosen = select_top(change, 10)
        before = known.copy()
        Ef21().decode_add(chunk.payload, known, Context("w", 100))
        assert np.flatnonzero(known != before).tolist() == chosen.tolist()
        assert (known[chosen] == before[chosen] + change[chosen]).all()
        assert encoder.state()["state/ef21/0/sent"].tobytes() == known.tobytes()


def test_a_gradient_that_stays_is_known_whole_after_some_rounds() -> None:
    g, encoder = np.arange(1, 101, dtype=np.float32), KeyEncoder("w", 100, F4)
    known = np.zeros(100, np.float32)
    for round in range(1, 11):
        (chunk,) = encoder.encode(encoder.prepare(g, Ef21Params(ratio=0.1), round))
        Ef21().decode_add(chunk.payload, known, Context("w", 100))
    assert (known == g).all()


def test_a_chunk_is_always_raw_or_never(rng: np.random.Generator) -> None:
    """Else the servers could not know whether a raw push is an increment."""
    encoder = KeyEncoder("w", 130, F4, chunk_elements=64)
    for round in range(1, 4):
        chunks = encoder.encode(encoder.prepare(np.zeros(130, np.float32), Ef21Params(ratio=0.3), round))
        assert [(chunk.n, chunk.codec) for chunk in chunks] == [(64, "ef21"), (64, "ef21"), (2, "none")]
    tiny = KeyEncoder("w", 1, F4)
    assert [chunk.codec for chunk in tiny.encode(tiny.prepare(np.ones(1, np.float32), Ef21Params()))] == ["none"]


@pytest.mark.parametrize("own", [{"on_nonfinite": "propagate"}, {"error_feedback": "on"}, {"ratio": 0}])
def test_what_would_break_the_sum_is_refused(own: dict[str, object]) -> None:
    with pytest.raises(ParameterError) as raised:
        parse_params({"type": "ef21", **own})
    assert raised.value.parameter == next(iter(own))


def test_a_change_beyond_float32_is_cut() -> None:
    largest = np.float32(np.finfo(np.float32).max)
    state = {"sent": np.full(64, -largest)}
    payload, _ = Ef21().encode(np.full(64, largest), state, Context("w", 64))
    Ef21().check(payload, Context("w", 64))
