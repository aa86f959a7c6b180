"""randomk: the same places at all workers, no indices, sums without decoding, both forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.compression.codec import Context, Payload
from kvstore.compression.randomk import RandomK, RandomKParams
from kvstore.compression.registry import codec_named, feedback_enabled, parse_params
from kvstore.errors import ParameterError, PayloadError


def decoded(payload: Payload, ctx: Context) -> Any:
    out = np.zeros(ctx.n, np.float32)
    codec_named("randomk").decode_add(payload, out, ctx)
    return out


def places(**where: Any) -> list[int]:
    ctx = Context(where.pop("key", "w"), 1000, **where)
    payload, _ = RandomK().encode(np.ones(1000, np.float32), None, ctx)
    return [int(one) for one in np.flatnonzero(decoded(payload, ctx))]


def test_places_are_shared_by_ranks_and_differ_otherwise() -> None:
    base = places(rank=0, seed=1)
    assert len(base) == 10
    assert base == places(rank=5, seed=1)
    for other in ({"seed": 2}, {"seed": 1, "round": 2}, {"seed": 1, "chunk": 1}, {"seed": 1, "key": "v"}):
        assert places(**other) != base


def test_values_alone_travel_and_say_where_they_belong() -> None:
    x, ctx = np.arange(1, 1001, dtype=np.float32), Context("w", 1000, seed=3, round=7)
    payload, _ = RandomK().encode(x, None, ctx)
    assert payload.nbytes == 40
    assert payload.meta == {"count": 10, "seed": 3, "round": 7, "value": "float32"}
    out = decoded(payload, Context("w", 1000))  # a receiver that knows neither seed nor round
    assert out[out != 0].tolist() == x[out != 0].tolist() == payload.data.view(np.float32).tolist()


def test_unbiased_is_right_on_average(rng: np.random.Generator) -> None:
    codec, x, draws = (
        RandomK(RandomKParams(unbiased=True, ratio=0.1)),
        rng.standard_normal(103).astype(np.float32),
        4000,
    )
    assert (codec.unbiased, codec.contraction, codec.feedback) == (True, False, False)
    total = np.zeros(103)
    for round in range(1, draws + 1):
        ctx = Context("w", 103, round=round)
        codec.decode_add(codec.encode(x, None, ctx)[0], total, ctx)
    assert (np.abs(total / draws - x) <= 6 * np.abs(x) * 10**0.5 / draws**0.5).all()


def test_feedback_with_the_unbiased_form_diverges_and_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"error_feedback.*randomk.*diverges"):
        parse_params({"type": "randomk", "unbiased": "true", "error_feedback": "on"})
    scaled: Any = parse_params({"type": "randomk", "unbiased": "true", "scaled": "true", "error_feedback": "on"})
    assert feedback_enabled(RandomK(scaled))
    assert feedback_enabled(RandomK())
    x, ctx = np.ones(1000, np.float32), Context("w", 1000)
    assert RandomK(scaled).encode(x, None, ctx)[0].data.tobytes() == RandomK().encode(x, None, ctx)[0].data.tobytes()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_sums_are_in_the_order_given(name: Any) -> None:
    codec, ctx = RandomK(RandomKParams(value_dtype=name)), Context("w", 100)
    parts = [codec.encode(np.full(100, value, np.float32), None, ctx)[0] for value in (2048, 1, -2048, 0.5)]
    total = codec.sum_encoded(parts, ctx)
    assert total is not None
    assert total.meta["value"] == "float32"
    assert total.data.view(np.float32).tolist() == [1.5]


def test_what_does_not_fit_is_not_summed() -> None:
    codec, x = RandomK(), np.full(100, 3e38, np.float32)
    one, other = (codec.encode(x, None, Context("w", 100, round=round))[0] for round in (1, 2))
    assert codec.sum_encoded([one, other], Context("w", 100)) is None
    assert codec.sum_encoded([one, one], Context("w", 100)) is None  # 6e38


def test_values_that_are_not_finite_are_refused() -> None:
    meta: dict[str, Any] = {"count": 1, "seed": 0, "round": 1, "value": "float32"}
    with pytest.raises(PayloadError, match="infinity or NaN"):
        codec_named("randomk").check(Payload(np.array([np.nan], "<f4").tobytes(), meta), Context("w", 10))
