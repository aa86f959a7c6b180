"""Every registered codec, without being named here, keeps what the interface promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from kvstore.compression.codec import Accumulating, Codec, Context, DecodesInto, FusedFeedback, Params, Payload
from kvstore.compression.encoder import EncodedChunk, KeyEncoder
from kvstore.compression.registry import (
    codec_class,
    codec_named,
    describe,
    known_names,
    make_codec,
    params_to_strings,
    parse_params,
)
from kvstore.errors import PayloadError

GOLDEN = Path(__file__).resolve().parent / "golden"
SIZES = (1, 2, 3, 15, 16, 17, 31, 64, 65, 1000, 4099)
F4 = np.dtype(np.float32)


@pytest.fixture(params=known_names())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def codec(name: str) -> Codec:
    return make_codec(codec_class(name).params_type())


def gradients(n: int, rng: np.random.Generator) -> list[Any]:
    """Shapes of data that codecs trip over: normal, constant, zeros, one large element, denormal, large."""
    one_large = np.zeros(n, np.float32)
    one_large[n // 2 :][:1] = 1e6
    normal = rng.standard_normal(n).astype(np.float32)
    return [normal, np.full(n, -0.25, np.float32), np.zeros(n, np.float32), one_large, normal * 1e-40, normal * 1e30]


def decoded(codec: Codec, payload: Payload, ctx: Context) -> Any:
    out = np.zeros(ctx.n, np.float32)
    codec.decode_add(payload, out, ctx)
    return out


def received(encoder: KeyEncoder, chunks: list[EncodedChunk]) -> Any:
    out = np.zeros(encoder.n, np.float64)
    for chunk in chunks:
        ctx = Context(encoder.key, chunk.n, chunk.index, chunk.offset, dtype=encoder.dtype)
        codec_named(chunk.codec).decode_add(chunk.payload, out[chunk.offset : chunk.offset + chunk.n], ctx)
    return out


def test_is_described_and_parsed_by_its_own_words(name: str, codec: Codec) -> None:
    (row,) = describe([name])
    assert row.name == name == codec.params.type
    assert row.summary
    assert codec.unit in ("chunk", "key")
    assert isinstance(codec, Codec)
    assert parse_params(params_to_strings(codec.params), top_level=False) == codec.params
    assert {"min_elements", "on_nonfinite", "error_feedback", "momentum", "warmup_rounds", "seed", "pull"} <= {
        parameter.name for parameter in row.parameters
    }


def test_error_is_bounded(codec: Codec, rng: np.random.Generator) -> None:
    for n in SIZES:
        for x in gradients(n, rng):
            ctx = Context("w", n)
            payload, _ = codec.encode(x, None, ctx)
            out = decoded(codec, payload, ctx)
            assert np.isfinite(out).all()
            if codec.contraction:
                error, size = np.linalg.norm(out.astype(np.float64) - x), np.linalg.norm(x.astype(np.float64))
                assert error <= size * (1 + 1e-6)


def test_size_is_never_above_what_is_declared(codec: Codec, rng: np.random.Generator) -> None:
    for n in (0, *SIZES):
        for x in gradients(n, rng):
            payload, _ = codec.encode(x, None, Context("w", n))
            assert payload.nbytes <= codec.max_bytes(n, F4)
            assert payload.data.dtype == np.uint8
            assert payload.data.ndim == 1
            if isinstance(codec, FusedFeedback):
                assert payload.nbytes == codec.max_bytes(n, F4)


def test_meta_is_small_and_plain(codec: Codec) -> None:
    payload, _ = codec.encode(np.ones(1000, np.float32), None, Context("w", 1000))
    assert len(payload.meta) <= 8
    assert all(type(key) is str and type(value) in (int, float, str) for key, value in payload.meta.items())


def test_encoding_is_deterministic_and_leaves_its_input(codec: Codec, rng: np.random.Generator) -> None:
    x = rng.standard_normal(1000).astype(np.float32)
    before, ctx = x.tobytes(), Context("w", 1000, seed=5)
    first, second = (codec.encode(x, None, ctx)[0] for _ in range(2))
    assert first.data.tobytes() == second.data.tobytes()
    assert first.meta == second.meta
    assert x.tobytes() == before


def test_decoding_adds_and_depends_on_the_payload_alone(name: str, codec: Codec, rng: np.random.Generator) -> None:
    x, ctx = rng.standard_normal(1000).astype(np.float32), Context("w", 1000)
    payload, _ = codec.encode(x, None, ctx)
    wire = Payload(payload.data.tobytes(), json.loads(json.dumps(payload.meta)))
    base = decoded(codec_named(name), wire, ctx)
    out = np.full(1000, 2, np.float32)
    codec.decode_add(payload, out, ctx)
    assert np.allclose(out, base + 2, rtol=1e-6)
    wide = np.zeros(1000)
    codec.decode_add(payload, wide, ctx)
    assert np.allclose(wide, base, rtol=1e-6)
    codec.check(wire, ctx)
    if isinstance(codec, DecodesInto):
        into = np.full(1000, np.nan, np.float32)
        codec.decode_into(payload, into, ctx)
        assert into.tobytes() == base.tobytes()
    if isinstance(codec, Accumulating):
        codec.accumulate([wire, payload], out, [ctx, ctx])
        assert np.allclose(out, 3 * base + 2, rtol=1e-6)


def test_linear_codecs_add_without_decoding(codec: Codec, rng: np.random.Generator) -> None:
    ctx = Context("w", 64)
    parts = [codec.encode(rng.standard_normal(64).astype(np.float32), None, ctx)[0] for _ in range(3)]
    total = codec.sum_encoded(parts, ctx)
    assert (total is not None) == codec.linear
    if total is not None:
        expected = np.sum([decoded(codec, part, ctx) for part in parts], axis=0)
        assert np.allclose(decoded(codec, total, ctx), expected, rtol=1e-5, atol=1e-6)


def test_broken_payloads_are_refused_or_decode_finite(codec: Codec, rng: np.random.Generator) -> None:
    n = 1000
    ctx = Context("w", n)
    payload, _ = codec.encode(rng.standard_normal(n).astype(np.float32), None, ctx)
    good = payload.data.tobytes()
    broken = [Payload(good[:cut], payload.meta) for cut in (0, 1, len(good) // 2, len(good) - 1)]
    broken += [Payload(good + bytes(more), payload.meta) for more in (1, 4, len(good))]
    broken += [
        Payload(good, {**payload.meta, key: bad}) for key in payload.meta for bad in (-1, 2**63, "x", float("nan"))
    ]
    broken += [Payload(good, {})] if payload.meta else []
    broken += [Payload(bytes(rng.integers(0, 256, len(good), dtype=np.uint8)), payload.meta) for _ in range(20)]
    for number, one in enumerate(broken):
        out = np.full(n, 3, np.float32)
        try:
            codec.check(one, ctx)
            codec.decode_add(one, out, ctx)
        except PayloadError as error:
            assert error.key == "w"
            assert (out == 3).all(), number
        else:
            assert out.shape == (n,)
            # raw is whatever was sent; what a codec computes from garbage must stay finite
            assert np.isfinite(out).all() or codec.params.type == "none", number


def test_truncated_and_oversized_payloads_are_refused(codec: Codec) -> None:
    ctx = Context("w", 1000)
    payload, _ = codec.encode(np.ones(1000, np.float32), None, ctx)
    for data in (payload.data.tobytes()[:-1], payload.data.tobytes() + b"\0"):
        with pytest.raises(PayloadError):
            codec.check(Payload(data, payload.meta), ctx)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3), (7, 5, 3)])
def test_any_shape_arrives_whole(codec: Codec, shape: tuple[int, ...]) -> None:
    n = int(np.prod(shape))
    encoder = KeyEncoder("w", n, F4, shape=shape)
    params = msgspec.structs.replace(codec.params, momentum=0.0)
    total = np.zeros(n)
    for round in range(1, 9):
        gradient = np.full(shape, 0.25, np.float32)
        chunks = list(encoder.encode(encoder.prepare(gradient, params, round)))
        assert sum(chunk.n for chunk in chunks) == n
        assert all(chunk.nbytes <= chunk.raw_nbytes for chunk in chunks)
        total += received(encoder, chunks)
    if codec.accumulates and n > 1:
        assert np.isin(total, (0, 0.25)).all()
        assert total.any() or n == 0
    elif "residual" in (kept := encoder.state()):
        assert np.allclose(total + kept["residual"], 2)
    elif n == 1:
        assert total.tolist() == [2]


def test_layout_of_the_gradient_plays_no_part(codec: Codec, rng: np.random.Generator) -> None:
    base = rng.standard_normal((40, 30)).astype(np.float32)
    wide = np.zeros((80, 30), np.float32)
    wide[::2] = base
    layouts = [base, np.asfortranarray(base), wide[::2], base[::-1].copy()[::-1], np.ascontiguousarray(base.T).T]
    payloads = set()
    for gradient in layouts:
        encoder = KeyEncoder("w", 1200, F4)
        chunks = encoder.encode(encoder.prepare(gradient, codec.params))
        payloads.add(b"".join(chunk.payload.data.tobytes() for chunk in chunks))
    assert len(payloads) == 1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floats_arrive(codec: Codec, dtype: Any) -> None:
    encoder = KeyEncoder("w", 1000, np.dtype(dtype))
    gradient: Any = np.full(1000, 0.5, dtype)
    total = received(encoder, list(encoder.encode(encoder.prepare(gradient, codec.params))))
    if codec.unbiased and codec.contraction:
        assert (total == 0.5).all()
    assert np.isfinite(total).all()


def test_state_goes_in_and_comes_out(codec: Codec, rng: np.random.Generator) -> None:
    """A saved and loaded encoder goes on exactly as the one that was not interrupted."""
    params: Params = codec.params
    one, two = KeyEncoder("w", 500, F4, chunk_elements=128), KeyEncoder("w", 500, F4, chunk_elements=128)
    pushes = rng.standard_normal((4, 500)).astype(np.float32)
    for round, gradient in enumerate(pushes, 1):
        expected = [chunk.payload.data.tobytes() for chunk in one.encode(one.prepare(gradient, params, round))]
        own = [chunk.payload.data.tobytes() for chunk in two.encode(two.prepare(gradient, params, round))]
        assert own == expected
        fresh = KeyEncoder("w", 500, F4, chunk_elements=128)
        fresh.load_state(two.state())
        two = fresh


def test_payloads_of_earlier_versions_decode_to_the_same(name: str) -> None:
    recorded = json.loads((GOLDEN / name / "payloads.json").read_text())
    assert recorded["codec"] == name
    for one in recorded["payloads"]:
        ctx = Context("w", one["n"], seed=1)
        out = decoded(codec_named(name), Payload(bytes.fromhex(one["data"]), one["meta"]), ctx)
        assert out.astype("<f4").tobytes().hex() == one["decoded"]


def test_context_is_a_value() -> None:
    with pytest.raises(AttributeError):
        Context("w", 1).n = 2  # type: ignore[misc]
