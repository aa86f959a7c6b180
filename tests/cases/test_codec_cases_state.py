"""What users ran into, for the codecs with state of their own: powersgd, eden, drive, dgc and ef21, by case number."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvstore
from kvstore.compression.codec import Context
from kvstore.compression.encoder import EncodedChunk, KeyEncoder
from kvstore.compression.registry import codec_named, parse_params

F4 = np.dtype(np.float32)
CODECS: dict[str, dict[str, object]] = {
    "powersgd": {"type": "powersgd", "rank": 2},
    "eden": {"type": "eden", "bits": 2},
    "drive": {"type": "drive"},
    "dgc": {"type": "dgc", "ratio": 0.05, "warmup_stages": 0},
    "ef21": {"type": "ef21", "ratio": 0.05},
}


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> dict[str, object]:
    return CODECS[str(request.param)]


def push(encoder: KeyEncoder, gradient: Any, codec: dict[str, object], round: int = 1) -> list[EncodedChunk]:
    return list(encoder.encode(encoder.prepare(gradient, parse_params(codec), round)))


def decoded(encoder: KeyEncoder, chunks: list[EncodedChunk]) -> Any:
    out = np.zeros(encoder.n, np.float32)
    for chunk in chunks:
        ctx = Context(encoder.key, chunk.n, chunk.index, chunk.offset, dtype=encoder.dtype)
        codec_named(chunk.codec).check(chunk.payload, ctx)
        codec_named(chunk.codec).decode_add(chunk.payload, out[chunk.offset : chunk.offset + chunk.n], ctx)
    return out


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1, 1)])
def test_r11_edge_shapes(codec: dict[str, object], shape: tuple[int, ...]) -> None:
    with kvstore.create("device") as store:
        store.set_gradient_compression(codec)
        store.init("w", np.zeros(shape, np.float32))
        for round in (1, 2, 3):
            momentum = {1: 1, 2: 1.9, 3: 2.71}[round] if codec["type"] == "dgc" else 1
            result = store.pushpull("w", [np.full(shape, 2, np.float32), np.full(shape, 3, np.float32)])
            assert result.shape == shape
            assert result.dtype == np.float32
            assert np.allclose(result, 5 * momentum)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_r17_half_precision_equals_float32_cast_back(codec: dict[str, object], dtype: Any) -> None:
    values: Any = (np.random.default_rng(17).standard_normal((250, 400)) ** 3).astype(dtype)
    results = []
    for kind in (np.dtype(dtype), F4):
        with kvstore.create("device") as store:
            store.set_gradient_compression(codec)
            store.init("w", np.zeros((250, 400), kind))
            results.append(store.pushpull("w", [values.astype(kind)] * 2))
    half, full = results
    assert half.dtype == dtype
    assert half.astype(np.float32).tobytes() == full.astype(dtype).astype(np.float32).tobytes()
    assert np.flatnonzero(half.astype(np.float32).reshape(-1)).max() > 65535  # indices above 16 bits are in place


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_r20_zeros_decode_to_exact_zeros(codec: dict[str, object], value: float) -> None:
    encoder = KeyEncoder("w", 10000, F4, shape=(100, 100))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for round in (1, 2):
            out = decoded(encoder, push(encoder, np.full((100, 100), value, np.float32), codec, round))
            assert not out.any()


def test_r20_one_zero_bucket_leaves_the_others(codec: dict[str, object]) -> None:
    x = np.random.default_rng(20).standard_normal((100, 100)).astype(np.float32)
    x.reshape(-1)[:4096] = 0  # a block of eden's
    encoder = KeyEncoder("w", 10000, F4, shape=(100, 100))
    out = decoded(encoder, push(encoder, x, codec))
    assert np.isfinite(out).all()
    assert out[4096:].any()
    if codec["type"] in ("eden", "drive", "dgc", "ef21"):
        assert not out[:4096].any()


@pytest.mark.parametrize("extreme", ["denormal", "largest", "alternating"])
def test_r20_extremes_stay_finite(codec: dict[str, object], extreme: str) -> None:
    x = np.zeros((100, 100), np.float32)
    if extreme == "denormal":
        x[:] = 1e-42
    else:
        x[7, 7] = 3.4e38
    encoder = KeyEncoder("w", 10000, F4, shape=(100, 100))
    params = {**codec, "momentum": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for round in (1, 2, 3):
            signs = {"alternating": (1, -1, 1), "denormal": (1, 1, 1), "largest": (1, 0, 0)}[extreme]
            out = decoded(encoder, push(encoder, x * np.float32(signs[round - 1]), params, round))
            assert np.isfinite(out).all()
            if extreme == "largest" and round == 1:
                assert out[707] == pytest.approx(3.4e38, rel=1e-3)
    assert all(np.isfinite(array).all() for array in encoder.state().values())


def test_r25_small_keys_go_raw_and_no_key_is_larger_than_raw(codec: dict[str, object]) -> None:
    with kvstore.create("device") as store:
        store.set_gradient_compression(
            {**codec, "min_elements": 1000}, per_key={"exempt": {"type": "none"}, "tiny*": codec}
        )
        shapes = {"bias": (10,), "matrix": (300, 400), "exempt": (300, 400), "tiny.vector": (3,), "tiny.matrix": (2, 3)}
        store.init({key: np.zeros(shape, np.float32) for key, shape in shapes.items()})
        store.push({key: np.full(shape, 0.5, np.float32) for key, shape in shapes.items()})
        counts = store.stats()["keys"]
        for key in shapes:
            assert counts[key]["sent_bytes"] <= counts[key]["raw_bytes"]
        assert counts["bias"]["sent_bytes"] == 40
        assert counts["exempt"]["sent_bytes"] == 480000
        assert counts["matrix"]["sent_bytes"] <= 480000 * 0.11
        assert (store.pull("bias") == 0.5).all()
        assert (store.pull("exempt") == 0.5).all()
