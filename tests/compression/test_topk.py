"""topk: the largest elements, ties, hostile indices, half-precision values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.compression.codec import Context, Payload
from kvstore.compression.encoder import KeyEncoder
from kvstore.compression.registry import codec_named
from kvstore.compression.topk import TopK, TopKParams, kept_of
from kvstore.errors import PayloadError


def decoded(payload: Payload, n: int) -> Any:
    out = np.zeros(n, np.float32)
    codec_named("topk").decode_add(payload, out, Context("w", n))
    return out


def test_how_many_are_kept() -> None:
    counts = [kept_of(n, 0.01) for n in (0, 1, 10, 100, 149, 151, 262144)]
    assert counts == [0, 1, 1, 1, 1, 2, 2621]
    assert kept_of(3, 1.0) == 3


def test_the_bytes() -> None:
    x = np.zeros(400, np.float32)
    x[[3, 300, 301]] = 1, -2, 0.5
    payload, _ = TopK(TopKParams(ratio=0.005)).encode(x, None, Context("w", 400))
    assert payload.meta == {"count": 2, "value": "float32"}
    assert payload.data.tobytes() == np.array([1, -2], "<f4").tobytes() + bytes([3, 0x80 | (296 & 127), 2])
    assert np.flatnonzero(decoded(payload, 400)).tolist() == [3, 300]


def test_zeros_are_never_sent() -> None:
    payload, _ = TopK(TopKParams(ratio=0.5)).encode(np.zeros(100, np.float32), None, Context("w", 100))
    assert (payload.nbytes, payload.meta["count"]) == (0, 0)
    assert not decoded(payload, 100).any()


def test_error_is_at_most_what_is_left_out(rng: np.random.Generator) -> None:
    x = rng.standard_normal(100_000).astype(np.float32)
    payload, _ = TopK().encode(x, None, Context("w", x.size))
    out = decoded(payload, x.size)
    assert (out[out != 0] == x[out != 0]).all()
    assert np.abs(x[out == 0]).max() <= np.abs(out[out != 0]).min()
    assert ((out - x) ** 2).sum() / (x**2).sum() == pytest.approx(0.915, abs=0.01)
    assert 8 * payload.nbytes / x.size < 0.43


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_cast_below_the_selection(name: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal(10_000).astype(np.float32)
    whole, _ = TopK().encode(x, None, Context("w", x.size))
    half, _ = TopK(TopKParams(value_dtype=name)).encode(x, None, Context("w", x.size))
    assert whole.nbytes - half.nbytes == 2 * 100
    exact, cast = decoded(whole, x.size), decoded(half, x.size)
    assert (np.flatnonzero(cast) == np.flatnonzero(exact)).all()
    assert np.allclose(cast, exact, rtol=2**-8)
    encoder = KeyEncoder("w", x.size, x.dtype)  # what the cast loses is sent later
    list(encoder.encode(encoder.prepare(x, TopKParams(value_dtype=name))))
    assert np.allclose(encoder.state()["residual"], x - cast)
    assert encoder.state()["residual"][np.flatnonzero(exact)].any()


@pytest.mark.parametrize(
    ("gaps", "count"),
    [
        (b"\x63\0", 2),  # the second index is 100 of 100
        (b"\xff\xff\xff\xff\x0f\0", 2),
        (b"\0\x80", 2),
        (b"\0", 2),
        (b"\0\0\0", 2),
        (b"\0" * 101, 101),
    ],
)
def test_hostile_indices_are_refused(gaps: bytes, count: int) -> None:
    out = np.full(100, 7, np.float32)
    payload = Payload(np.ones(count, "<f4").tobytes() + gaps, {"count": count, "value": "float32"})
    with pytest.raises(PayloadError, match="key 'w'"):
        codec_named("topk").check(payload, Context("w", 100))
    with pytest.raises(PayloadError):
        codec_named("topk").decode_add(payload, out, Context("w", 100))
    assert (out == 7).all()


def test_a_count_is_no_reason_to_take_memory() -> None:
    with pytest.raises(PayloadError):
        codec_named("topk").check(Payload(b"", {"count": 2**31, "value": "float32"}), Context("w", 2**31))
