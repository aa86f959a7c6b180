"""int8: nearest or at random, a scale per block."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.compression.codec import Context, Payload
from kvstore.compression.int8 import Int8, Int8Params
from kvstore.compression.registry import feedback_enabled, parse_params
from kvstore.errors import PayloadError


def test_codes_by_hand() -> None:
    x = np.zeros(128, np.float32)
    x[:4], x[64] = [127, -63.5, 62.4, 0.5], 254
    payload, _ = Int8(Int8Params(block=64)).encode(x, None, Context("w", 128))
    assert payload.data[:8].view(np.float32).tolist() == [1, 2]
    codes = payload.data[8:].view(np.int8)
    assert codes[:4].tolist() == [127, -64, 62, 0]
    assert codes[64] == 127


def test_error_is_that_of_255_levels(rng: np.random.Generator) -> None:
    x, ctx = rng.standard_normal(100_000).astype(np.float32), Context("w", 100_000)
    payload, _ = Int8().encode(x, None, ctx)
    out = np.zeros(x.size, np.float32)
    Int8().decode_add(payload, out, ctx)
    assert ((out - x) ** 2).sum() / (x**2).sum() == pytest.approx(4.4e-5, rel=0.2)
    assert 8 * payload.nbytes / x.size == pytest.approx(8.125, abs=0.001)


def test_stochastic_rounding_is_right_on_average_and_differs_between_workers(rng: np.random.Generator) -> None:
    codec = Int8(Int8Params(rounding="stochastic"))
    assert codec.unbiased
    x = rng.standard_normal(256).astype(np.float32)
    total, seen, draws = np.zeros(256), set(), 500
    for round in range(draws):
        ctx = Context("w", 256, rank=round % 2, round=round // 2 + 1)
        payload, _ = codec.encode(x, None, ctx)
        seen.add(payload.data.tobytes())
        codec.decode_add(payload, total, ctx)
    step = float(np.abs(x).max()) / 127
    assert len(seen) == draws
    assert (np.abs(total / draws - x) <= 6 * step / 2 / draws**0.5).all()


def test_feedback_is_allowed_with_either_rounding() -> None:
    for rounding in ("nearest", "stochastic"):
        params = parse_params({"type": "int8", "rounding": rounding, "error_feedback": "on"})
        assert feedback_enabled(Int8(params))  # type: ignore[arg-type]
        assert not feedback_enabled(Int8())


def test_the_code_below_minus_127_is_refused() -> None:
    data = np.ones(1, np.float32).tobytes() + b"\x80"
    with pytest.raises(PayloadError, match="-128"):
        Int8().check(Payload(data, {"block": 64}), Context("w", 1))
