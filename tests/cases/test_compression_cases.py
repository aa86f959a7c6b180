"""What users of such systems ran into, at the level of codecs and encoders; the names are those of the cases."""

from __future__ import annotations

import secrets
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore.compression.codec import Accumulating, Context, Params
from kvstore.compression.encoder import EncodedChunk, KeyEncoder
from kvstore.compression.policy import CompressionPolicy
from kvstore.compression.registry import codec_named, parse_params
from kvstore.errors import ConfigError, NonFiniteError, ParameterError

F4 = np.dtype(np.float32)
HALF = parse_params({"type": "2bit", "threshold": "0.5"})


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers whose seed is printed with a failure."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201
    return np.random.default_rng(seed)


def push(encoder: KeyEncoder, gradient: Any, params: Params = HALF, round: int = 1) -> list[EncodedChunk]:
    return list(encoder.encode(encoder.prepare(gradient, params, round)))


def decoded(encoder: KeyEncoder, chunks: list[EncodedChunk]) -> Any:
    out = np.zeros(encoder.n, np.float32)
    for chunk in chunks:
        ctx = Context(encoder.key, chunk.n, chunk.index, chunk.offset, dtype=encoder.dtype)
        codec_named(chunk.codec).decode_add(chunk.payload, out[chunk.offset : chunk.offset + chunk.n], ctx)
    return out


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("pushes", "expected"),
    [
        ([0.25, 0.25, 0.25], [0, 0.5, 0]),
        ([2.25, 0, 0, 0, 0, 0], [0.5, 0.5, 0.5, 0.5, 0, 0]),
        ([0.5, 0], [0.5, 0]),
        ([0.4375, 0.0625], [0, 0.5]),
    ],
)
def test_r15_the_exact_rule(pushes: list[float], expected: list[float], sign: int) -> None:
    encoder = KeyEncoder("w", 100, F4)
    for value, sent in zip(pushes, expected, strict=True):
        out = decoded(encoder, push(encoder, np.full(100, sign * value, np.float32)))
        assert (out == sign * sent).all()


def test_r15_two_workers_add() -> None:
    workers = [KeyEncoder("w", 100, F4, rank=rank) for rank in (0, 1)]
    chunks = [
        push(encoder, np.full(100, value, np.float32))[0] for encoder, value in zip(workers, (3.0, 0.7), strict=True)
    ]
    out, codec = np.zeros(100, np.float32), codec_named("2bit")
    assert isinstance(codec, Accumulating)
    codec.accumulate([chunk.payload for chunk in chunks], out, [Context("w", 100, rank=rank) for rank in (0, 1)])
    assert (out == 1).all()


def test_r15_a_million_floats_take_at_most_a_fourteenth() -> None:
    encoder = KeyEncoder("w", 10**6, F4)
    assert 14 * sum(chunk.nbytes for chunk in push(encoder, np.ones(10**6, np.float32))) <= 4 * 10**6


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"type": "3bit"}, "3bit"),
        ({"threshold": "0.5"}, "type"),
        ({"type": "2bit", "threshold": "0"}, "threshold"),
        ({"type": "2bit", "threshold": "-0.5"}, "threshold"),
        ({"type": "2bit", "threshold": "abc"}, "threshold"),
        ({"type": "2bit", "threshold": "NaN"}, "threshold"),
        ({"type": "2bit", "threshold": "0.5", "level": "3"}, "level"),
    ],
)
def test_r16_a_bad_parameter_is_named(given: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        CompressionPolicy.parse(given)


def test_r16_text_and_number_are_equal() -> None:
    assert CompressionPolicy.parse({"type": "2bit", "threshold": "0.5"}) == CompressionPolicy.parse(
        {"type": "2bit", "threshold": 0.5}
    )


def test_r16_none_names_the_call_to_use() -> None:
    with pytest.raises(ParameterError, match=r"clear_gradient_compression\(\)"):
        CompressionPolicy.parse({"type": "none"})


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_r17_2bit_of_half_precision_is_that_of_float32(dtype: Any, rng: np.random.Generator) -> None:
    n = 100_000
    half, single = KeyEncoder("w", n, np.dtype(dtype)), KeyEncoder("w", n, F4)
    for round in (1, 2, 3):
        gradient: Any = rng.standard_normal(n).astype(dtype)
        own = decoded(half, push(half, gradient, round=round)).astype(dtype)
        expected = decoded(single, push(single, gradient.astype(np.float32), round=round)).astype(dtype)
        assert own.dtype == dtype
        assert own.tobytes() == expected.tobytes()


def test_r21_one_nan_is_refused_and_poisons_nothing() -> None:
    encoder, other = KeyEncoder("w", 1000, F4, rank=1, chunk_elements=256), KeyEncoder("v", 1000, F4, rank=1)
    finite = np.full(1000, 0.3, np.float32)
    for round in (1, 2, 3, 4):
        push(encoder, finite, round=round)
    poisoned = finite.copy()
    poisoned[500] = np.nan
    with pytest.raises(NonFiniteError, match="key 'w', rank 1: 1 of 1000") as raised:
        [encoder.prepare(poisoned, HALF, 5), other.prepare(finite, HALF, 5)]
    assert (raised.value.key, raised.value.rank, raised.value.count) == ("w", 1, 1)
    for one in (encoder, other):  # the same round may be pushed again
        assert np.isfinite(decoded(one, push(one, finite, round=5))).all()
        assert np.isfinite(one.state()["residual"]).all()


def test_r21_propagated_nan_is_visible_and_leaves_no_trace() -> None:
    encoder = KeyEncoder("w", 1000, F4, chunk_elements=256)
    params = parse_params({"type": "2bit", "on_nonfinite": "propagate"})
    poisoned = np.full(1000, 0.3, np.float32)
    poisoned[500] = np.inf
    out = decoded(encoder, push(encoder, poisoned, params))
    assert np.flatnonzero(~np.isfinite(out)).tolist() == [500]
    for round in (2, 3):
        assert np.isfinite(decoded(encoder, push(encoder, np.full(1000, 0.3, np.float32), params, round))).all()


def test_r25_a_bias_is_never_larger_than_raw() -> None:
    for n in range(1, 40):
        encoder = KeyEncoder("layer.bias", n, F4)
        assert all(chunk.nbytes <= chunk.raw_nbytes for chunk in push(encoder, np.ones(n, np.float32)))


def test_r25_small_and_excepted_keys_travel_raw() -> None:
    policy = CompressionPolicy.parse({"type": "2bit", "min_elements": "1000"}, {"special": {"type": "none"}})
    sent = {}
    for key, n in (("layer.bias", 10), ("layer.weight", 10**6), ("special", 10**6)):
        encoder = KeyEncoder(key, n, F4)
        chunks = push(encoder, np.ones(n, np.float32), policy.params_for(key, n, F4))
        sent[key] = {chunk.codec for chunk in chunks}, sum(chunk.nbytes for chunk in chunks)
    assert sent == {
        "layer.bias": ({"none"}, 40),
        "layer.weight": ({"2bit"}, 250_000),
        "special": ({"none"}, 4 * 10**6),
    }


def test_r10_a_strided_gradient_is_encoded_as_its_copy(rng: np.random.Generator) -> None:
    base = rng.standard_normal((64, 64)).astype(np.float32)
    row = base[0]
    for view in (base.T, base[::2], base[::-1], np.asfortranarray(base), np.broadcast_to(row, (64, 64))):
        one, other = KeyEncoder("w", view.size, F4), KeyEncoder("w", view.size, F4)
        own, expected = push(one, view), push(other, np.ascontiguousarray(view))
        assert [chunk.payload.data.tobytes() for chunk in own] == [chunk.payload.data.tobytes() for chunk in expected]


@pytest.mark.parametrize(("shape", "expected"), [((), [3.25]), ((0,), []), ((3, 0), []), ((1,), [3.25])])
def test_r11_scalars_are_exact_and_empty_stays_empty(shape: tuple[int, ...], expected: list[float]) -> None:
    gradient = np.full(shape, 3.25, np.float32)
    encoder = KeyEncoder("w", gradient.size, F4)
    assert decoded(encoder, push(encoder, gradient)).tolist() == expected
