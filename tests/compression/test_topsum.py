"""Top-sum: the published inequalities and sizes, its restriction, hostile bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.compression.codec import Context, Payload
from kvstore.compression.policy import CompressionPolicy
from kvstore.compression.registry import parse_params
from kvstore.compression.topsum import Topsum, most_held, select
from kvstore.errors import ParameterError, PayloadError


def sent(v: Any) -> Any:
    codec, ctx = Topsum(), Context("w", v.size)
    payload, _ = codec.encode(v, None, ctx)
    assert payload.nbytes <= codec.max_bytes(v.size, v.dtype)
    out = np.zeros(v.size)
    codec.decode_add(payload, out, ctx)
    return out


@pytest.mark.parametrize("n", [1, 2, 3, 31, 1000, 4096])
@pytest.mark.parametrize("kind", ["normal", "ones", "one", "heavy"])
def test_published_inequalities(n: int, kind: str, rng: np.random.Generator) -> None:
    one = np.zeros(n)
    one[n // 2] = -3
    v = {"normal": rng.standard_normal(n), "ones": np.ones(n), "one": one, "heavy": rng.standard_cauchy(n)}[kind]
    v = v.astype(np.float32)
    q, norm2 = sent(v), float(v.astype(np.float64) @ v.astype(np.float64))
    held = np.count_nonzero(q)
    assert q @ v >= norm2 * (1 - 1e-6)
    assert held <= math.ceil(math.sqrt(n)) == most_held(n)
    assert q @ q == pytest.approx(held * norm2, rel=1e-6)
    places = np.flatnonzero(q)
    left_out = np.delete(np.abs(v), places)
    assert left_out.size == 0 or np.abs(v[places]).min() >= left_out.max()
    # the smallest such set: without its smallest element the sum stays below the norm
    sizes = np.sort(np.abs(v[places]).astype(np.float64))
    assert sizes[1:].sum() < math.sqrt(norm2)


def test_ties_go_to_the_first() -> None:
    assert select(np.ones(1000, np.float32))[0].tolist() == list(range(32))


def test_published_sizes() -> None:
    n = 1 << 20
    v = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    payload, _ = Topsum().encode(v, None, Context("w", n))
    assert 245 <= float(payload.meta["count"]) <= 280
    assert abs(float(payload.meta["bits"]) + 32 - 5176) < 300
    payload, _ = Topsum().encode(np.ones(n, np.float32), None, Context("w", n))
    assert (payload.meta["count"], payload.meta["bits"]) == (1024, 2080 - 32)


def test_zeros_send_nothing() -> None:
    assert not sent(np.zeros(10, np.float32)).any()


def test_gradient_descent_converges_linearly() -> None:
    """On a quadratic of condition 10 with the rate of the theorem, l / (L^2 sqrt n)."""
    n = 25
    curvature = np.linspace(1, 10, n)
    x = np.ones(n)
    start = float(curvature @ x**2)
    for _ in range(4000):
        x -= 1 / (100 * 5) * sent((curvature * x).astype(np.float32))
    assert float(curvature @ x**2) < 1e-3 * start


def test_several_workers_are_refused() -> None:
    with pytest.raises(ParameterError, match="does not average out"):
        CompressionPolicy.parse({"type": "2bit"}, {"w": {"type": "topsum"}}).check_workers(2)
    CompressionPolicy.parse({"type": "topsum"}).check_workers(1)


def test_feedback_is_refused() -> None:
    with pytest.raises(ParameterError, match="diverges"):
        parse_params({"type": "topsum", "error_feedback": "on"})


@settings(deadline=None, max_examples=150)
@given(data=st.binary(max_size=60), count=st.integers(-1, 12), cut=st.integers(0, 9), n=st.integers(1, 90))
def test_hostile_bytes(data: bytes, count: int, cut: int, n: int) -> None:
    bits = 8 * (len(data) - 4) - cut
    payload, ctx, out = Payload(data, {"count": count, "bits": bits}), Context("w", n), np.ones(n, np.float32)
    try:
        Topsum().check(payload, ctx)
    except PayloadError as error:
        assert error.key == "w"
        with pytest.raises(PayloadError):
            Topsum().decode_add(payload, out, ctx)
        assert (out == 1).all()
    else:
        Topsum().decode_add(payload, out, ctx)
        assert np.isfinite(out).all()
        assert np.count_nonzero(out != 1) <= count
