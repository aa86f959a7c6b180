"""What users of quantisers ran into, for QSGD and top-sum; the names are those of the cases."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvstore
from kvstore.compression.codec import Context, Payload
from kvstore.compression.encoder import KeyEncoder
from kvstore.compression.policy import CompressionPolicy
from kvstore.compression.registry import codec_named, make_codec, parse_params
from kvstore.errors import PayloadError

F4 = np.dtype(np.float32)
CODINGS = ("fixed", "elias_dense", "elias_dense_nz", "elias_sparse", "huffman", "auto")


def through(gradient: Any, params: dict[str, Any], dtype: Any = F4, chunk: int = 262144) -> tuple[Any, int]:
    """What arrives of one push, as float64, and the bytes it took."""
    flat = np.asarray(gradient).reshape(-1)
    encoder, out, sent = KeyEncoder("w", flat.size, np.dtype(dtype), chunk_elements=chunk), np.zeros(flat.size), 0
    for one in encoder.encode(encoder.prepare(gradient, parse_params(params))):
        ctx = Context("w", one.n, one.index, one.offset, dtype=encoder.dtype)
        codec_named(one.codec).check(one.payload, ctx)
        codec_named(one.codec).decode_add(one.payload, out[one.offset : one.offset + one.n], ctx)
        sent += one.nbytes
    return out, sent


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_r20_buckets_of_zero(coding: str, norm: str) -> None:
    params = {"type": "qsgd", "coding": coding, "norm": norm, "bucket_size": 64}
    rng = np.random.default_rng(1)
    mixed = rng.standard_normal(640).astype(np.float32)
    mixed[64:128] = 0
    huge = np.zeros(640, np.float32)
    huge[100] = 3.4e38
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for zeros in (np.zeros(640, np.float32), np.full(640, -0.0, np.float32)):
            assert not through(zeros, params)[0].any()
        out, _ = through(mixed, params)
        assert np.isfinite(out).all()
        assert not out[64:128].any()
        assert out[:64].any()
        assert out[128:].any()
        tiny, _ = through(np.full(640, 1e-42, np.float32), params)
        assert (np.abs(tiny) <= 1e-42 * 8.1).all()
        assert through(huge, params)[0].tolist() == huge.astype(np.float64).tolist()


def direct(x: Any, params: dict[str, Any]) -> Any:
    """What a payload decodes to, even where a push would rather send raw bytes."""
    codec, ctx, out = make_codec(parse_params(params)), Context("w", x.size), np.zeros(x.size)
    payload, _ = codec.encode(x, None, ctx)
    codec.check(payload, ctx)
    codec.decode_add(payload, out, ctx)
    return out


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("levels", [1, 2, 127, 128, 255, 256])
def test_r23_levels_and_buckets_at_the_edges(coding: str, levels: int) -> None:
    n = 300
    for bucket in (1, 2, 7, 64, n - 1, n, n + 1, 10 * n):
        params = {"type": "qsgd", "coding": coding, "levels": levels, "bucket_size": bucket}
        for place, value in ((0, 1.5), (150, -2.25), (n - 1, -0.1)):
            one = np.zeros(n, np.float32)
            one[place] = value
            assert direct(one, params).tolist() == one.astype(float).tolist()
        x = np.random.default_rng(bucket).standard_normal(n).astype(np.float32)
        out = direct(x, params)
        largest = int(np.abs(x).argmax())
        assert out[largest] == x[largest]
        limit = np.repeat(np.maximum.reduceat(np.abs(x), range(0, n, bucket)), bucket)[:n]
        assert (np.abs(out) <= limit).all()
        assert out.tolist() == direct(x, {**params, "coding": "fixed"}).tolist()


def test_r23_a_million_zeros_and_broken_payloads() -> None:
    assert through(np.zeros(10**6, np.float32), {"type": "qsgd"})[1] < 0.05 * 4 * 10**6
    x, ctx = np.random.default_rng(0).standard_normal(5000).astype(np.float32), Context("w", 5000)
    payload, _ = codec_named("qsgd").encode(x, None, ctx)
    data = payload.data.tobytes()
    for broken in (data[:-1], data[: len(data) // 2], data + b"\0", data + data):
        with pytest.raises(PayloadError):
            codec_named("qsgd").check(Payload(broken, payload.meta), ctx)


@pytest.mark.parametrize("name", ["qsgd", "topsum"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_r11_scalars_are_exact_and_empty_stays_empty(name: str, shape: tuple[int, ...]) -> None:
    out, _ = through(np.full(shape, 2.7, np.float32), {"type": name})
    assert out.tolist() == np.full(shape, 2.7, np.float32).reshape(-1).astype(float).tolist()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("params", [{"type": "qsgd"}, {"type": "qsgd", "bits": 8, "norm": "l2"}, {"type": "topsum"}])
def test_r17_half_precision_is_quantised_as_float32(dtype: Any, params: dict[str, Any]) -> None:
    gradient: Any = np.random.default_rng(3).standard_normal(100_000).astype(dtype)
    gradient[70_000] = 60  # above index 65,535
    half, _ = through(gradient, params, dtype)
    wide, _ = through(gradient.astype(np.float32), params)
    assert half.tolist() == wide.tolist()
    assert half[70_000] > 59


def test_r25_no_key_takes_more_bytes_than_raw() -> None:
    rng = np.random.default_rng(2)
    for n in (1, 2, 3, 10, 50, 1000):
        for params in (
            {"type": "qsgd"},
            {"type": "qsgd", "levels": 32767, "coding": "elias_dense"},
            {"type": "topsum"},
        ):
            assert through(rng.standard_normal(n).astype(np.float32), params)[1] <= 4 * n
    policy = CompressionPolicy.parse({"type": "qsgd", "min_elements": 11}, {"head": {"type": "none"}})
    assert policy.params_for("bias", 10, F4).type == policy.params_for("head", 10**6, F4).type == "none"
    assert policy.params_for("weight", 10**6, F4).type == "qsgd"


def qsvrg_worker() -> Any:
    centres = np.random.default_rng(0).standard_normal((30, 50))
    with kvstore.create("dist_sync") as kv:
        own = centres[kv.rank :: kv.num_workers]
        run = kvstore.QSVRG(
            kv,
            {"w": np.zeros(50)},
            lambda y: {"w": y["w"] - own.mean(axis=0)},
            lambda x, y, j: ({"w": x["w"] - own[j]}, {"w": y["w"] - own[j]}),
            samples=len(own),
            lr=0.3,
            epoch_len=15,
            objective=lambda y: float(((y["w"] - own) ** 2).sum(axis=1).mean() / 2),
        )
        return [epoch.objective for epoch in run.epochs(31)]


def test_qsvrg_on_three_processes(run_job: Any) -> None:
    centres = np.random.default_rng(0).standard_normal((30, 50))
    found = run_job(qsvrg_worker, workers=3, servers=2).ok()
    assert found[0] == found[1] == found[2]
    gap = np.array(found[0]) - ((centres.mean(axis=0) - centres) ** 2).sum(axis=1).mean() / 2
    assert (gap[1:] <= 0.9 ** np.arange(1, 31) * gap[0]).all()


def qsgd_worker() -> Any:
    with kvstore.create("dist_sync") as kv:
        kv.set_gradient_compression({"type": "qsgd", "bits": 8})
        kv.init("w", np.zeros(100_000, np.float32))
        gradient = np.random.default_rng(1).standard_normal(100_000).astype(np.float32)
        pulled = kv.pushpull("w", gradient)
        error = float(((pulled - 2 * gradient) ** 2).sum() / (gradient**2).sum())
        return [error, int(kv.stats()["total"]["sent_bytes"]), float(pulled[:1000].sum())]


def test_r23_workers_round_differently_through_servers(run_job: Any) -> None:
    """Errors of two workers add up as variances (2 x), not as the same error twice (4 x)."""
    gradient = np.random.default_rng(1).standard_normal(100_000).astype(np.float32)
    single = through(gradient, {"type": "qsgd", "bits": 8})[0] - gradient
    one = float((single**2).sum() / (gradient**2).sum())
    first, second = run_job(qsgd_worker, workers=2, servers=2, env={"KVSTORE_CHUNK_ELEMENTS": "16384"}).ok()
    assert first[2] == second[2]
    assert 1.8 * one < first[0] < 2.2 * one
    assert first[1] < 0.26 * 400_000
