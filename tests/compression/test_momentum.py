"""Momentum correction around any codec, and what encoders do with whole keys and kept sums."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore.compression.codec import Context, Params
from kvstore.compression.encoder import KeyEncoder
from kvstore.compression.none import NoneParams
from kvstore.compression.policy import CompressionPolicy
from kvstore.compression.registry import codec_named, parse_params
from kvstore.errors import NonFiniteError

F4 = np.dtype(np.float32)


def push(encoder: KeyEncoder, gradient: Any, params: Params, round: int = 1) -> Any:
    out = np.zeros(encoder.n, np.float64)
    for chunk in encoder.encode(encoder.prepare(gradient, params, round)):
        ctx = Context(encoder.key, chunk.n, chunk.index, chunk.offset, dtype=encoder.dtype)
        codec_named(chunk.codec).decode_add(chunk.payload, out[chunk.offset : chunk.offset + chunk.n], ctx)
    return out


@pytest.mark.parametrize("codec", ["2bit", "powersgd", "none"])
def test_what_is_sent_and_unsent_adds_up_to_the_momentum(codec: str, rng: np.random.Generator) -> None:
    params = parse_params({"type": codec, "momentum": "0.5"}, top_level=False)
    encoder = KeyEncoder("w", 400, F4, chunk_elements=128, shape=(20, 20))
    u, total, sent = np.zeros(400), np.zeros(400), np.zeros(400)
    for round in range(1, 10):
        g = rng.standard_normal(400).astype(np.float32)
        u = 0.5 * u + g
        total += u
        sent += push(encoder, g, params, round)
    kept = encoder.state()
    assert np.allclose(kept["momentum"], u, atol=1e-5)
    assert np.allclose(sent + kept.get("residual", 0), total, atol=1e-4)
    assert np.abs(sent).max() > 0


def test_rounds_that_travel_raw_have_the_same_momentum() -> None:
    params = parse_params({"type": "2bit", "threshold": "1", "momentum": "0.5", "warmup_rounds": "2"})
    encoder = KeyEncoder("w", 64, F4)
    ones = np.ones(64, np.float32)
    assert [push(encoder, ones, params, round)[0] for round in (1, 2, 3)] == [1, 1.5, 1]  # 1.75, of which 1 is sent
    assert encoder.state()["residual"][0] == 0.75


def test_small_keys_are_trained_alike() -> None:
    policy = CompressionPolicy.parse({"type": "dgc", "min_elements": "1000"})
    params = policy.params_for("bias", 10, F4)
    assert params == NoneParams(momentum=0.9)
    encoder = KeyEncoder("bias", 10, F4)
    assert np.allclose([push(encoder, np.ones(10, np.float32), params, round)[0] for round in (1, 2)], [1, 1.9])
    assert policy.params_for("count", 10, np.dtype(np.int64)) == NoneParams()


def test_the_callers_gradient_is_not_touched() -> None:
    g = np.ones(64, np.float32)
    encoder, params = KeyEncoder("w", 64, F4), parse_params({"type": "none", "momentum": "0.5"}, top_level=False)
    chunks = [list(encoder.encode(encoder.prepare(g, params, round), copy=False)) for round in (1, 2, 3)]
    assert (g == 1).all()
    assert [chunk.payload.data.view(np.float32)[0] for (chunk,) in chunks] == [1, 1.5, 1.75]  # no shared memory either


def test_momentum_ends_with_its_setting() -> None:
    encoder, ones = KeyEncoder("w", 64, F4), np.ones(64, np.float32)
    push(encoder, ones, parse_params({"type": "2bit", "momentum": "0.5"}))
    push(encoder, ones, parse_params({"type": "2bit"}), 2)
    assert set(encoder.state()) == {"residual"}


@pytest.mark.parametrize("codec", ["2bit", "none"])
def test_nan_is_refused_before_it_enters_the_momentum(codec: str) -> None:
    encoder = KeyEncoder("w", 64, F4)
    params = parse_params({"type": codec, "momentum": "0.5"}, top_level=False)
    push(encoder, np.ones(64, np.float32), params)
    before = {name: array.tobytes() for name, array in encoder.state().items()}
    with pytest.raises(NonFiniteError):
        encoder.prepare(np.full(64, np.nan, np.float32), params, 2)
    assert {name: array.tobytes() for name, array in encoder.state().items()} == before


def test_nan_that_may_pass_goes_raw_and_leaves_the_momentum() -> None:
    encoder = KeyEncoder("w", 128, F4, chunk_elements=64)
    params = parse_params({"type": "2bit", "momentum": "0.5", "threshold": "1", "on_nonfinite": "propagate"})
    g = np.ones(128, np.float32)
    push(encoder, g, params)
    g[3] = np.nan
    out = push(encoder, g, params, 2)
    assert np.isnan(out[3])
    assert np.isfinite(encoder.state()["momentum"]).all()
    assert (encoder.state()["momentum"][64:] == 1.5).all()


def test_sums_that_overflow_with_the_momentum_are_refused() -> None:
    encoder, params = KeyEncoder("w", 64, F4), parse_params({"type": "none", "momentum": "0.9"}, top_level=False)
    large = np.full(64, 3e38, np.float32)
    push(encoder, large, params)
    with pytest.raises(NonFiniteError):
        encoder.prepare(large, params, 2)
    push(encoder, -large, params, 2)  # the bound is met, the sum is not too large


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floats_have_momentum_too(dtype: Any) -> None:
    encoder = KeyEncoder("w", 64, np.dtype(dtype))
    params = parse_params({"type": "none", "momentum": "0.5"}, top_level=False)
    ones: Any = np.ones(64, dtype)
    assert [push(encoder, ones, params, round)[0] for round in (1, 2, 3)] == [1, 1.5, 1.75]


def test_a_raw_push_ends_a_codecs_state() -> None:
    """Servers drop their sum of increments with it."""
    params = parse_params({"type": "ef21", "ratio": "0.1"})
    encoder, ones = KeyEncoder("w", 64, F4), np.ones(64, np.float32)
    push(encoder, ones, params)
    assert "state/ef21/0/sent" in encoder.state()
    push(encoder, ones, NoneParams(), 2)
    assert encoder.state() == {}
