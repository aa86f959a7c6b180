"""terngrad: three values, the clip, what is said about feedback."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.compression.codec import Context
from kvstore.compression.registry import feedback_enabled, parse_params
from kvstore.compression.terngrad import TernGrad, TernGradParams
from kvstore.errors import ParameterError


def decoded(codec: TernGrad, x: Any, **where: Any) -> Any:
    ctx = Context("w", x.size, **where)
    out = np.zeros(x.size, np.float32)
    codec.decode_add(codec.encode(x, None, ctx)[0], out, ctx)
    return out


def test_three_values_per_bucket_and_zeros_stay_zero(rng: np.random.Generator) -> None:
    x = rng.standard_normal(192).astype(np.float32)
    x[64:128] = 0
    out = decoded(TernGrad(TernGradParams(clip=0, bucket_size=64)), x)
    for bucket in range(3):
        part = slice(64 * bucket, 64 * bucket + 64)
        most = np.abs(x[part]).max()
        assert set(np.abs(out[part]).tolist()) <= {0, most}
        assert np.abs(out[part]).max() == most  # the largest is always sent, with its sign
        assert (out[part] * x[part] >= 0).all()


def test_right_on_average_without_a_clip(rng: np.random.Generator) -> None:
    codec, x, draws = TernGrad(TernGradParams(clip=0)), rng.standard_normal(512).astype(np.float32), 2000
    assert codec.unbiased
    mean = sum(decoded(codec, x, round=round) for round in range(1, draws + 1)) / draws
    deviation = np.sqrt(np.abs(x) * np.abs(x).max())
    assert (np.abs(mean - x) <= 6 * deviation / draws**0.5 + 1e-3).all()


def test_error_with_the_clip_is_about_the_input(rng: np.random.Generator) -> None:
    x = rng.standard_normal(100_000).astype(np.float32)
    out = decoded(TernGrad(), x)
    assert ((out - x) ** 2).sum() / (x**2).sum() == pytest.approx(1.0, abs=0.05)
    assert not TernGrad().unbiased


def test_feedback_diverges_and_is_refused_unless_scaled(rng: np.random.Generator) -> None:
    with pytest.raises(ParameterError, match=r"error_feedback.*terngrad.*diverges"):
        parse_params({"type": "terngrad", "error_feedback": "on"})
    codec = TernGrad(TernGradParams(clip=0, scaled=True))
    assert feedback_enabled(codec)
    x = rng.standard_normal(5120).astype(np.float32)
    residual = np.zeros_like(x)
    for round in range(1, 300):
        p = x + residual
        residual = p - decoded(codec, p, round=round)
    assert np.linalg.norm(residual) < 30 * np.linalg.norm(x)  # bounded; unscaled it grows without limit
