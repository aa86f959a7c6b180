"""1bit: bytes, both scalings, the rule for zero, hostile bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.compression.codec import Codec, Context, FusedFeedback, Payload
from kvstore.compression.onebit import OneBit, OneBitParams
from kvstore.errors import PayloadError


def decoded(codec: OneBit, payload: Payload, ctx: Context) -> Any:
    out = np.zeros(ctx.n, np.float32)
    codec.decode_add(payload, out, ctx)
    return out


def test_interfaces() -> None:
    codec: Any = OneBit()
    assert isinstance(codec, Codec)
    assert isinstance(codec, FusedFeedback)


def test_two_means() -> None:
    x, ctx, codec = np.array([1, 3, 0, -4, -2, -0.0], np.float32), Context("w", 6), OneBit()
    payload, _ = codec.encode(x, None, ctx)
    assert payload.data.tobytes() == np.array([1, 3], "<f4").tobytes() + bytes([0b11100100])
    assert payload.meta == {"bucket": 1024, "means": 2}
    assert decoded(codec, payload, ctx).tolist() == [1, 1, 1, -3, -3, 1]


def test_ef_sign_takes_the_mean_magnitude() -> None:
    x, ctx, codec = np.array([1, 3, -4, -4], np.float32), Context("w", 4), OneBit(OneBitParams(scaling="ef_sign"))
    payload, _ = codec.encode(x, None, ctx)
    assert decoded(codec, payload, ctx).tolist() == [3, 3, -3, -3]
    assert payload.nbytes == 5


@pytest.mark.parametrize("scaling", ["two_means", "ef_sign"])
def test_error_is_one_minus_two_over_pi(scaling: Any, rng: np.random.Generator) -> None:
    x, ctx = rng.standard_normal(200_000).astype(np.float32), Context("w", 200_000)
    codec = OneBit(OneBitParams(scaling=scaling))
    residual = np.zeros_like(x)
    payload, _ = codec.encode_feedback(x, residual, None, ctx)
    assert (residual**2).sum() / (x**2).sum() == pytest.approx(1 - 2 / np.pi, abs=0.01)
    assert np.allclose(decoded(codec, payload, ctx) + residual, x, atol=1e-6)


def test_buckets_are_scaled_by_themselves() -> None:
    x, ctx = np.repeat(np.array([1e-3, 0, 1e3], np.float32), 64), Context("w", 192)
    codec = OneBit(OneBitParams(bucket_size=64))
    assert decoded(codec, codec.encode(x, None, ctx)[0], ctx).tolist() == x.tolist()


@pytest.mark.parametrize("meta", [{}, {"bucket": 64}, {"bucket": 100, "means": 1}, {"bucket": 64, "means": 3}])
def test_meta_that_breaks_the_format_is_refused(meta: dict[str, Any]) -> None:
    with pytest.raises(PayloadError):
        OneBit().check(Payload(bytes(9), meta), Context("w", 8))


@pytest.mark.parametrize("scale", [-1, np.nan, np.inf])
def test_scales_that_are_none_are_refused(scale: float) -> None:
    data = np.array([1, scale], "<f4").tobytes() + b"\0"
    with pytest.raises(PayloadError, match="a scale"):
        OneBit().check(Payload(data, {"bucket": 64, "means": 2}), Context("w", 8))
