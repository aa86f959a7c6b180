"""QSGD as a codec: unbiased, with the published variance, sparsity and size; safe against any bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.compression.codec import Context, Payload
from kvstore.compression.codings import Coding
from kvstore.compression.encoder import KeyEncoder
from kvstore.compression.kernels import chosen_kernels
from kvstore.compression.qsgd import CodingChoice, Norm, Qsgd, QsgdParams
from kvstore.compression.registry import make_codec, parse_params
from kvstore.errors import ParameterError, PayloadError

N = 1 << 20
CODINGS = [choice for choice in CodingChoice if choice is not CodingChoice.AUTO]


@pytest.fixture(scope="module")
def gaussian() -> Any:
    return np.random.default_rng(20).standard_normal(N).astype(np.float32)


@pytest.fixture(params=["numba", "numpy"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("KVSTORE_KERNELS", request.param)
    chosen_kernels.cache_clear()
    yield request.param
    chosen_kernels.cache_clear()


def encoded(codec: Qsgd, x: Any, **where: Any) -> Payload:
    return codec.encode(x, None, Context("w", x.size, **where))[0]


def decoded(payload: Payload, n: int) -> Any:
    out = np.zeros(n, np.float32)
    Qsgd().decode_add(payload, out, Context("w", n))
    return out


def whole(n: int, s: int, coding: CodingChoice = CodingChoice.AUTO) -> Qsgd:
    return Qsgd(QsgdParams(levels=s, bucket_size=n, norm=Norm.L2, coding=coding))


@pytest.mark.parametrize(
    ("coding", "bits"), [("elias_dense", 3.310), ("elias_dense_nz", 2.942), ("elias_sparse", 2.755)]
)
def test_bits_per_dimension_of_a_gaussian(gaussian: Any, coding: str, bits: float) -> None:
    payload = encoded(whole(N, 1024, CodingChoice(coding)), gaussian)
    assert abs(float(payload.meta["bits"]) / N - bits) < 0.01
    assert abs(8 * payload.nbytes / N - bits) < 0.01


def test_bits_of_the_textbook_codes_on_a_constant() -> None:
    """The figures that 2.8 n + 32 would refuse: exactly 4 and 3 bits."""
    x = np.full(1 << 14, -0.3, np.float32)
    assert encoded(whole(x.size, 128, CodingChoice.ELIAS_DENSE), x).meta["bits"] == 4 * x.size
    bits = int(encoded(whole(x.size, 128, CodingChoice.ELIAS_SPARSE), x).meta["bits"])
    assert 3 * x.size <= bits <= 3 * x.size + 40


def test_huffman_over_pairs(gaussian: Any) -> None:
    codec = Qsgd(QsgdParams(levels=23, bucket_size=512, norm=Norm.L2, coding=CodingChoice.HUFFMAN))
    assert 8 * encoded(codec, gaussian).nbytes / N <= 2.30  # norms and table included
    chunk = gaussian[:262144]
    assert 8 * encoded(codec, chunk).nbytes / chunk.size <= 2.30


def test_bits_of_buckets(gaussian: Any) -> None:
    """Section 2.4's table of bucketed codes, norms not counted."""
    rows = [("l2", 23, "elias_sparse", 2.778), ("l2", 7, "elias_sparse", 1.476), ("max", 7, "elias_dense_nz", 4.22)]
    for norm, s, coding, bits in rows:
        codec = Qsgd(QsgdParams(levels=s, norm=Norm(norm), coding=CodingChoice(coding)))
        count = float(encoded(codec, gaussian).meta["bits"]) / N
        if coding == "elias_sparse":
            count -= 17 / 512  # omega(count + 1) of each bucket: 16 to 17 bits from 256 non-zeros on, fewer below
        assert abs(count - bits) < 0.03


def test_unbiased_and_variance(rng: np.random.Generator) -> None:
    """20,000 quantisations: the mean is within 4.5 sigma of each of 64 coordinates, the variance below its bound."""
    x = rng.standard_normal(64).astype(np.float32)
    for codec, bound in ((whole(64, 8), 1.0), (Qsgd(QsgdParams(levels=3, bucket_size=64)), 64 / 36)):
        n = 20_000
        draws = np.stack([decoded(encoded(codec, x, round=round), 64) for round in range(n)]).astype(np.float64)
        sigma = draws.std(axis=0) / math.sqrt(n)
        # numbers of 16 bits round up at most 2^-16 of a step too often
        slack = np.abs(draws).max() / codec.s * 2.0**-16 * 8
        assert (np.abs(draws.mean(axis=0) - x) <= 4.5 * sigma + slack).all()
        assert ((draws - x) ** 2).sum(axis=1).mean() <= bound * (x.astype(np.float64) ** 2).sum()


def test_variance_and_sparsity_of_a_gaussian(gaussian: Any) -> None:
    norm = float((gaussian.astype(np.float64) ** 2).sum())
    error = decoded(encoded(whole(N, 1024), gaussian), N) - gaussian.astype(np.float64)
    assert abs((error**2).sum() / norm - 0.1665) < 0.002
    for s in (1, 4, 16):
        out = decoded(encoded(whole(N, s), gaussian), N).astype(np.float64)
        assert ((out - gaussian) ** 2).sum() / norm <= min(N / s**2, math.sqrt(N) / s)
        held = np.count_nonzero(out)
        assert held <= s * (s + math.sqrt(N))
        payload = encoded(whole(N, s, CodingChoice.ELIAS_SPARSE), gaussian)
        paper = held * (3 * math.log2(max(2 * N / held, 2)) / 2 + 3) + 64  # Theorem 3.2 in shape, o(1) = 0
        assert float(payload.meta["bits"]) <= paper


def test_auto_is_the_shortest(gaussian: Any) -> None:
    x = gaussian[:65536].copy()
    x[:60000] *= 1e-3
    for norm in Norm:
        for s in (1, 7, 23, 127):
            sizes = {}
            for coding in CODINGS:
                if coding is not CodingChoice.UNARY or s <= 30:
                    sizes[coding] = encoded(Qsgd(QsgdParams(levels=s, norm=norm, coding=coding)), x).nbytes
            auto = encoded(Qsgd(QsgdParams(levels=s, norm=norm)), x)
            assert auto.nbytes == min(sizes.values())
            assert auto.nbytes <= Qsgd(QsgdParams(levels=s, norm=norm)).max_bytes(x.size, x.dtype)


@pytest.mark.parametrize("norm", list(Norm))
@pytest.mark.parametrize("s", [1, 2, 7, 127, 128, 255, 256, 32767])
def test_every_coding_decodes_to_the_same(kernels: str, s: int, norm: Norm, rng: np.random.Generator) -> None:
    x = rng.standard_normal(700).astype(np.float32)
    x[64:128] = 0
    results = set()
    for coding in [*CODINGS, CodingChoice.AUTO]:
        if coding is CodingChoice.UNARY and s > 30:
            continue
        codec = Qsgd(QsgdParams(levels=s, bucket_size=64, norm=norm, coding=coding))
        payload = encoded(codec, x)
        codec.check(payload, Context("w", 700))
        assert payload.nbytes <= codec.max_bytes(700, x.dtype)
        out = decoded(payload, 700)
        results.add(out.tobytes())
        scale = np.sqrt(np.add.reduceat(x.astype(float) ** 2, range(0, 700, 64))) if norm is Norm.L2 else None
        limit = np.maximum.reduceat(np.abs(x), range(0, 700, 64)) if scale is None else scale
        assert (np.abs(out) <= np.repeat(limit, 64)[:700] * (1 + 1e-6)).all()
        assert not out[64:128].any()
    assert len(results) == 1


def test_workers_rounds_and_keys_draw_differently() -> None:
    """The same (seed, rank, key, round) gives the same bytes; errors of workers are uncorrelated."""
    x = np.full(4096, 0.37, np.float32)
    x[0] = 1
    codec = Qsgd(QsgdParams(levels=1, bucket_size=4096))
    where = [{"rank": 0}, {"rank": 1}, {"round": 2}, {"seed": 1}, {"chunk": 1}]
    assert encoded(codec, x).data.tobytes() == encoded(codec, x, rank=0, round=1).data.tobytes()
    errors = [decoded(encoded(codec, x, **one), 4096) - x for one in where]
    for i, a in enumerate(errors):
        for b in errors[:i]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(4096)
    mean = np.mean([decoded(encoded(codec, x, rank=rank), 4096) for rank in range(16)], axis=0)
    assert ((mean - x) ** 2).mean() < 1.3 / 16 * (errors[0] ** 2).mean()


def test_edges() -> None:
    """Q4: zeros, minus zeros, one element, denormals, the largest floats, sizes around the bucket's."""
    for norm in Norm:
        for n in (1, 2, 7, 511, 512, 513, 1025):
            codec = Qsgd(QsgdParams(norm=norm))
            assert encoded(codec, np.zeros(n, np.float32)).meta["bits"] == 0
            assert not decoded(encoded(codec, np.full(n, -0.0, np.float32)), n).any()
            one = np.zeros(n, np.float32)
            one[n // 2] = -3.4e38
            assert decoded(encoded(codec, one), n).tolist() == one.tolist()
            tiny = np.full(n, 1e-42, np.float32)
            assert (np.abs(decoded(encoded(codec, tiny), n)) <= 1e-42 * math.sqrt(n) * 1.01).all()
            out = decoded(encoded(codec, np.full(n, 3.4e38, np.float32)), n)
            assert np.isfinite(out).all()


def test_parameters() -> None:
    assert parse_params({"type": "qsgd"}) == QsgdParams()
    assert (QsgdParams().s, QsgdParams(bits=8).s, QsgdParams(bits=2).s) == (7, 127, 1)
    assert parse_params({"type": "qsgd", "bits": "8", "norm": "l2", "coding": "huffman", "scaled": "true"}) == (
        QsgdParams(bits=8, norm=Norm.L2, coding=CodingChoice.HUFFMAN, scaled=True)
    )
    wrong: list[dict[str, object]] = [
        {"bits": 4, "levels": 7},
        {"bits": 1},
        {"bits": 17},
        {"levels": 0},
        {"levels": 32768},
        {"bucket_size": 0},
        {"norm": "l1"},
        {"coding": "zip"},
        {"coding": "unary", "levels": 31},
    ]
    for one in wrong:
        with pytest.raises(ParameterError) as error:
            parse_params({"type": "qsgd", **one})
        assert error.value.parameter in one


def test_feedback_is_refused_unless_scaled() -> None:
    """It diverges: the error of one push can be many times the push."""
    with pytest.raises(ParameterError, match="diverges"):
        parse_params({"type": "qsgd", "error_feedback": "on"})
    params = parse_params({"type": "qsgd", "error_feedback": "on", "scaled": "true", "levels": "1", "norm": "l2"})
    codec = make_codec(params)
    rng = np.random.default_rng(1)
    encoder = KeyEncoder("w", 4096, np.dtype(np.float32))
    for round in range(1, 60):
        gradient = rng.standard_normal(4096).astype(np.float32)
        list(encoder.encode(encoder.prepare(gradient, codec.params, round)))
    # a contraction with 1 - delta = w / (1 + w), w = sqrt(512): what is unsent stays below (1 + w) pushes' norm
    assert np.linalg.norm(encoder.state()["residual"]) < 2 * (1 + math.sqrt(512)) * math.sqrt(4096)


def test_scaled_denormals_keep_their_codes() -> None:
    codec = Qsgd(QsgdParams(scaled=True, levels=1, norm=Norm.L2))
    x = np.full(600, 1e-45, np.float32)
    codec.check(encoded(codec, x), Context("w", 600))


@pytest.mark.parametrize("coding", [choice.value for choice in CODINGS])
def test_hostile_payloads(coding: str) -> None:
    @settings(deadline=None, max_examples=40)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        n = data.draw(st.integers(1, 200))
        codec = Qsgd(QsgdParams(bucket_size=data.draw(st.integers(1, 250)), coding=CodingChoice(coding)))
        x = np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal(n).astype(np.float32)
        payload = encoded(codec, x)
        raw = bytearray(payload.data.tobytes())
        for place in data.draw(st.lists(st.integers(0, 8 * len(raw) - 1), max_size=4)):
            raw[place // 8] ^= 1 << place % 8
        raw = raw[: len(raw) - data.draw(st.sampled_from([0, 0, 0, 1, 5]))]
        meta = dict(payload.meta)
        for name in data.draw(st.lists(st.sampled_from(sorted(meta)), max_size=2)):
            meta[name] = data.draw(st.integers(-1, 2**40) | st.floats() | st.integers(0, 600))
        bad, ctx = Payload(bytes(raw), json.loads(json.dumps(meta))), Context("w", n)
        out = np.full(n, 3, np.float32)
        try:
            Qsgd().check(bad, ctx)
        except PayloadError as error:
            assert error.key == "w"
            with pytest.raises(PayloadError):
                Qsgd().decode_add(bad, out, ctx)
            assert (out == 3).all()
        else:
            Qsgd().decode_add(bad, out, ctx)
            assert not np.isnan(out).any()

    run()


def test_a_payload_cannot_ask_for_memory() -> None:
    """Numbers in the header do not allocate: a tiny payload that announces gigabytes is refused."""
    meta = {"levels": 7, "bucket_size": 1, "coding": int(Coding.HUFFMAN), "bits": 2**33}
    for n in (10, 2**40):
        with pytest.raises(PayloadError):
            Qsgd().check(Payload(b"\1" * 100, meta), Context("w", n))
