"""What users of such systems ran into, for the casts, block, sign, sparse and randomised codecs."""

from __future__ import annotations

import secrets
import warnings
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import kvstore
from kvstore.compression.codec import Context
from kvstore.compression.encoder import EncodedChunk, KeyEncoder
from kvstore.compression.policy import CompressionPolicy
from kvstore.compression.registry import codec_named, make_codec, parse_params
from kvstore.errors import ParameterError

if TYPE_CHECKING:  # of the prelude that every worker's script begins with
    caught: Any = None

F4 = np.dtype(np.float32)
SETTINGS: list[dict[str, Any]] = [
    {"type": "fp16"},
    {"type": "bf16"},
    {"type": "fp8"},
    {"type": "fp8", "format": "e5m2", "block": 64},
    {"type": "int8"},
    {"type": "int8", "rounding": "stochastic", "block": 64},
    {"type": "1bit"},
    {"type": "1bit", "scaling": "ef_sign", "bucket_size": 64},
    {"type": "topk"},
    {"type": "topk", "value_dtype": "float16", "ratio": 0.1},
    {"type": "randomk"},
    {"type": "randomk", "unbiased": True, "value_dtype": "bfloat16"},
    {"type": "terngrad"},
    {"type": "terngrad", "clip": 0, "bucket_size": 64},
    {"type": "natural"},
]
every = pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: "-".join(str(value) for value in one.values()))


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers whose seed is printed with a failure."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201
    return np.random.default_rng(seed)


def push(encoder: KeyEncoder, gradient: Any, setting: dict[str, Any], round: int = 1) -> list[EncodedChunk]:
    return list(encoder.encode(encoder.prepare(gradient, parse_params(setting), round)))


def decoded(encoder: KeyEncoder, chunks: list[EncodedChunk]) -> Any:
    out = np.zeros(encoder.n, np.float32)
    for chunk in chunks:
        ctx = Context(encoder.key, chunk.n, chunk.index, chunk.offset, dtype=encoder.dtype)
        codec_named(chunk.codec).decode_add(chunk.payload, out[chunk.offset : chunk.offset + chunk.n], ctx)
    return out


# --- R11: edge shapes ------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize(("shape", "expected"), [((), [0.1]), ((0,), []), ((3, 0), []), ((1,), [0.1])])
def test_r11_scalars_are_exact_and_empty_stays_empty(
    setting: dict[str, Any], shape: tuple[int, ...], expected: list[float]
) -> None:
    gradient = np.full(shape, 0.1, np.float32)
    encoder = KeyEncoder("w", gradient.size, F4)
    assert decoded(encoder, push(encoder, gradient, setting)).tolist() == pytest.approx(expected, rel=1e-7)


def edge_shapes(settings: list[dict[str, Any]]) -> list[Any]:
    wrong = []
    with kvstore.create("dist_sync") as kv:
        for number, setting in enumerate(settings):
            kv.set_gradient_compression(setting)
            for shape in ((), (0,), (3, 0), (1,)):
                key = f"{number} {shape}"
                kv.init(key, np.zeros(shape, np.float32))
                pulled = kv.pushpull(key, np.full(shape, 0.3 * (kv.rank + 1), np.float32))
                if (
                    pulled.shape != shape
                    or pulled.dtype != np.float32
                    or not (pulled == np.float32(0.3) + np.float32(0.6)).all()
                ):
                    wrong.append([setting["type"], list(shape), str(pulled)])
    return wrong


@pytest.mark.parametrize("servers", [1, 3])
def test_r11_edge_shapes_over_processes(run_job: Any, servers: int) -> None:
    one_each = list({setting["type"]: setting for setting in SETTINGS}.values())
    for wrong in run_job(edge_shapes, workers=2, servers=servers, args={"settings": one_each}).ok():
        assert wrong == []


# --- R17: half-precision keys ----------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_r17_half_precision_is_that_of_float32_cast_back(
    setting: dict[str, Any], dtype: Any, rng: np.random.Generator
) -> None:
    n = 100_000
    half, single = KeyEncoder("w", n, np.dtype(dtype)), KeyEncoder("w", n, F4)
    for round in (1, 2, 3):
        gradient: Any = rng.standard_normal(n).astype(dtype)
        chunks = push(half, gradient, setting, round)
        own = decoded(half, chunks).astype(dtype)
        if setting["type"] in ("fp16", "bf16"):  # two bytes for two bytes: they travel raw, which is exact
            assert {chunk.codec for chunk in chunks} == {"none"}
            expected = gradient
        else:
            expected = decoded(single, push(single, gradient.astype(np.float32), setting, round)).astype(dtype)
            assert {chunk.codec for chunk in chunks} == {setting["type"]}
        assert own.dtype == dtype
        assert own.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value_dtype", ["float32", "float16", "bfloat16"])
def test_r17_indices_above_65535_land_where_they_belong(dtype: Any, value_dtype: str) -> None:
    places = [0, 65_534, 65_535, 65_536, 65_537, 99_999]
    gradient: Any = np.zeros(100_000, dtype)
    gradient[places] = [1, -2, 4, -8, 16, -32]
    encoder = KeyEncoder("w", gradient.size, np.dtype(dtype))
    out = decoded(encoder, push(encoder, gradient, {"type": "topk", "ratio": 1e-4, "value_dtype": value_dtype}))
    assert np.flatnonzero(out).tolist() == places
    assert out[places].tolist() == [1, -2, 4, -8, 16, -32]


# --- R20: a block of zeros -------------------------------------------------------------------------------------------


@every
def test_r20_zeros_decode_to_zeros_and_nothing_to_nan(setting: dict[str, Any], rng: np.random.Generator) -> None:
    n, block = 4096, 1024  # 1024 is a multiple of every block here
    normal = rng.standard_normal(n).astype(np.float32)
    one_block = normal.copy()
    one_block[block : 2 * block] = 0
    largest = np.zeros(n, np.float32)
    largest[100] = 3.4e38
    cases = {
        "all zero": np.zeros(n, np.float32),
        "one block": one_block,
        "minus zero": np.full(n, -0.0, np.float32),
        "denormal": np.full(n, 1e-42, np.float32),
        "largest": largest,
        "two largest": largest + np.roll(largest, 1),
    }
    for name, x in cases.items():
        encoder = KeyEncoder("w", n, F4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = decoded(encoder, push(encoder, x, setting))
        assert np.isfinite(out).all(), name
        if encoder.state():
            assert np.isfinite(encoder.state()["residual"]).all(), name
        zero = np.repeat(np.abs(x).reshape(-1, block).max(axis=1) == 0, block)
        assert not out[zero].any(), name


@pytest.mark.parametrize("name", ["fp8", "int8", "1bit", "terngrad"])
def test_r20_other_blocks_are_as_if_alone(name: str, rng: np.random.Generator) -> None:
    whole = rng.standard_normal(4096).astype(np.float32)
    holed = whole.copy()
    holed[1024:2048] = 0
    first, second = KeyEncoder("w", 4096, F4), KeyEncoder("w", 4096, F4)
    a, b = (decoded(one, push(one, x, {"type": name})) for one, x in ((first, whole), (second, holed)))
    assert a[:1024].tolist() == b[:1024].tolist()
    assert a[2048:].tolist() == b[2048:].tolist()


# --- R24: a sign has no zero -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", ["two_means", "ef_sign"])
def test_r24_what_is_always_zero_stays_zero(scaling: str) -> None:
    encoder, setting = KeyEncoder("w", 5000, F4), {"type": "1bit", "scaling": scaling}
    total = np.zeros(5000)
    for round in range(1, 101):
        total += decoded(encoder, push(encoder, np.zeros(5000, np.float32), setting, round))
    assert not total.any()


@pytest.mark.parametrize("scaling", ["two_means", "ef_sign"])
def test_r24_zeros_beside_others_stay_within_a_quantum(scaling: str) -> None:
    gradient = np.zeros(1000, np.float32)
    gradient[::3], gradient[1::3] = 0.5, -0.25
    encoder, setting = KeyEncoder("w", 1000, F4), {"type": "1bit", "scaling": scaling}
    total, largest, quantum = np.zeros(1000), [], 0.0
    for round in range(1, 101):
        out = decoded(encoder, push(encoder, gradient, setting, round))
        quantum = max(quantum, float(np.abs(out).max()))
        total += out
        largest.append(float(np.abs(total[2::3]).max()))
        if round == 1:
            assert (out[::3] > 0).all()
            assert (out[1::3] < 0).all()
    assert max(largest) <= quantum
    assert max(largest[50:]) <= max(largest[:50]) * 1.01, "it does not grow"
    assert (np.sign(total) == np.sign(gradient))[gradient != 0].all()
    assert np.allclose(total + encoder.state()["residual"], 100 * gradient, atol=1e-3)


# --- R25: what should not be compressed ------------------------------------------------------------------------------


@every
def test_r25_no_size_is_larger_than_raw(setting: dict[str, Any], rng: np.random.Generator) -> None:
    for n in (*range(1, 40), 63, 64, 65, 1025):
        for dtype in (np.float32, np.float16):
            encoder = KeyEncoder("layer.bias", n, np.dtype(dtype))
            chunks = push(encoder, rng.standard_normal(n).astype(dtype), setting)
            assert all(chunk.nbytes <= chunk.raw_nbytes for chunk in chunks), n


@every
def test_r25_small_and_excepted_keys_travel_raw(setting: dict[str, Any]) -> None:
    policy = CompressionPolicy.parse({**setting, "min_elements": "1000"}, {"special.*": {"type": "none"}})
    used = {}
    for key, n in (("layer.bias", 10), ("layer.weight", 10**6), ("special.weight", 10**5)):
        encoder = KeyEncoder(key, n, F4)
        gradient = np.ones(n, np.float32)
        chunks = list(encoder.encode(encoder.prepare(gradient, policy.params_for(key, n, F4))))
        used[key] = {chunk.codec for chunk in chunks}
        if key == "layer.weight":
            assert sum(chunk.nbytes for chunk in chunks) <= n * 2
    assert used == {"layer.bias": {"none"}, "layer.weight": {setting["type"]}, "special.weight": {"none"}}


@every
def test_r25_the_first_rounds_may_travel_raw(setting: dict[str, Any]) -> None:
    encoder, gradient = KeyEncoder("w", 10_000, F4), np.full(10_000, 0.3, np.float32)
    used = [{c.codec for c in push(encoder, gradient, {**setting, "warmup_rounds": 2}, round)} for round in (1, 2, 3)]
    assert used == [{"none"}, {"none"}, {setting["type"]}]


# --- which codecs take error feedback --------------------------------------------------------------------------------

FEEDBACK: dict[str, tuple[bool, bool]] = {  # by default; when asked for
    "fp16": (False, True),
    "bf16": (False, True),
    "fp8": (False, True),
    "int8": (False, True),
    "1bit": (True, True),
    "topk": (True, True),
    "randomk": (True, True),
    "randomk unbiased": (False, False),
    "terngrad": (False, False),
    "natural": (False, True),
}


@pytest.mark.parametrize("name", FEEDBACK)
def test_feedback_by_default_and_on_request(name: str) -> None:
    kind, _, form = name.partition(" ")
    setting: dict[str, Any] = {"type": kind, **({"unbiased": "true"} if form else {})}
    default, allowed = FEEDBACK[name]
    assert make_codec(parse_params(setting)).feedback == default
    if allowed:
        assert parse_params({**setting, "error_feedback": "on"})
    else:
        with pytest.raises(ParameterError, match=r"error_feedback.*diverges"):
            parse_params({**setting, "error_feedback": "on"})
        assert make_codec(parse_params({**setting, "error_feedback": "on", "scaled": "true"})).feedback


def test_why_feedback_is_refused(rng: np.random.Generator) -> None:
    """The residual of an unbiased codec of high variance grows without limit; that of the scaled form does not."""
    x, sizes = rng.standard_normal(1000).astype(np.float32), {}
    for name, setting in {
        "unbiased": {"type": "randomk", "unbiased": "true", "ratio": "0.1"},
        "scaled": {"type": "randomk", "unbiased": "true", "scaled": "true", "ratio": "0.1"},
    }.items():
        codec, residual = make_codec(parse_params(setting)), np.zeros(1000)
        for round in range(1, 61):
            p, ctx = (x + residual).astype(np.float32), Context("w", 1000, round=round)
            sent = np.zeros(1000, np.float32)
            codec.decode_add(codec.encode(p, None, ctx)[0], sent, ctx)
            residual = p.astype(np.float64) - sent
        sizes[name] = float(np.linalg.norm(residual) / np.linalg.norm(x))
    assert sizes["scaled"] < 30
    assert sizes["unbiased"] > 1e4
