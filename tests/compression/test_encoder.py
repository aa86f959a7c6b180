"""One key at one worker: what is sent, what is kept, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from kvstore.compression.codec import Context, Params, Payload, State
from kvstore.compression.encoder import EncodedChunk, KeyEncoder
from kvstore.compression.none import NoneCodec, NoneParams
from kvstore.compression.policy import RAW
from kvstore.compression.registry import codec_named, parse_params
from kvstore.errors import ArrayError, CheckpointError, NonFiniteError

F4 = np.dtype(np.float32)
TWO_BIT = parse_params({"type": "2bit"})
NO_FEEDBACK = parse_params({"type": "2bit", "error_feedback": "off"})
PROPAGATE = parse_params({"type": "2bit", "on_nonfinite": "propagate"})


def push(encoder: KeyEncoder, gradient: Any, params: Params = TWO_BIT, round: int = 1) -> list[EncodedChunk]:
    return list(encoder.encode(encoder.prepare(gradient, params, round)))


def received(encoder: KeyEncoder, chunks: list[EncodedChunk]) -> Any:
    """What a server adds, in float32 or wider."""
    out = np.zeros(encoder.n, np.float64 if encoder.dtype == np.float64 else np.float32)
    for chunk in chunks:
        part = out[chunk.offset : chunk.offset + chunk.n]
        ctx = Context(encoder.key, chunk.n, chunk.index, chunk.offset, dtype=encoder.dtype)
        codec_named(chunk.codec).decode_add(chunk.payload, part, ctx)
    return out


def floats(*values: float) -> Any:
    """A gradient long enough that encoding it saves bytes."""
    return np.resize(np.array(values, np.float32), 32)


def test_chunks_cover_the_key_in_order() -> None:
    encoder = KeyEncoder("w", 1000, F4, chunk_elements=256)
    chunks = push(encoder, np.ones(1000, np.float32))
    assert [(chunk.index, chunk.offset, chunk.n) for chunk in chunks] == [
        (0, 0, 256),
        (1, 256, 256),
        (2, 512, 256),
        (3, 768, 232),
    ]
    assert {chunk.codec for chunk in chunks} == {"2bit"}
    assert [chunk.nbytes for chunk in chunks] == [64, 64, 64, 60]
    assert [chunk.raw_nbytes for chunk in chunks] == [1024, 1024, 1024, 928]
    assert (received(encoder, chunks) == 0.5).all()


def test_chunks_do_not_change_the_result(rng: np.random.Generator) -> None:
    gradients = rng.standard_normal((3, 1000)).astype(np.float32)
    one, many = KeyEncoder("w", 1000, F4), KeyEncoder("w", 1000, F4, chunk_elements=64)
    for gradient in gradients:
        assert received(one, push(one, gradient)).tobytes() == received(many, push(many, gradient)).tobytes()


def test_chunks_are_encoded_when_asked_for() -> None:
    encoder = KeyEncoder("w", 1000, F4, chunk_elements=256)
    gradient = np.zeros(1000, np.float32)
    chunks = encoder.encode(encoder.prepare(gradient, TWO_BIT))
    next(chunks)
    gradient[:] = 9  # not the store's way, but it shows that the second chunk has not been read yet
    assert received(encoder, [next(chunks)])[256] == 0.5


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_floats_are_encoded_as_float32(dtype: type, rng: np.random.Generator) -> None:
    gradient: Any = rng.standard_normal(1000).astype(dtype)
    half, single = KeyEncoder("w", 1000, np.dtype(dtype)), KeyEncoder("w", 1000, F4)
    for _ in range(3):
        own, expected = push(half, gradient), push(single, gradient.astype(np.float32))
        assert own[0].payload.data.tobytes() == expected[0].payload.data.tobytes()
    assert half.state()["residual"].tobytes() == single.state()["residual"].tobytes()


def test_gradient_is_never_changed(rng: np.random.Generator) -> None:
    gradient = rng.standard_normal(1000).astype(np.float32)
    before = gradient.tobytes()
    gradient.flags.writeable = False
    encoder = KeyEncoder("w", 1000, F4)
    for params in (TWO_BIT, NO_FEEDBACK, RAW):
        push(encoder, gradient, params)
    assert gradient.tobytes() == before


def test_raw_chunks_are_copies_unless_the_caller_waits() -> None:
    encoder, gradient = KeyEncoder("w", 32, F4), floats(1)
    (copied,) = encoder.encode(encoder.prepare(gradient, RAW))
    (shared,) = encoder.encode(encoder.prepare(gradient, RAW), copy=False)
    assert not np.shares_memory(copied.payload.data, gradient)
    assert np.shares_memory(shared.payload.data, gradient)


@pytest.mark.parametrize("gradient", [np.ones(31, np.float32), np.ones(32), np.ones(32, np.int32)])
def test_a_gradient_of_another_key_is_refused(gradient: Any) -> None:
    with pytest.raises(ArrayError, match="the key has 32 of float32"):
        KeyEncoder("w", 32, F4).prepare(gradient, TWO_BIT)


def test_residual_survives_changes_of_setting() -> None:
    encoder = KeyEncoder("w", 32, F4)
    push(encoder, floats(0.4), TWO_BIT)
    assert received(encoder, push(encoder, floats(0), parse_params({"type": "2bit", "threshold": 0.25})))[0] == 0.25
    assert received(encoder, push(encoder, floats(0.1), TWO_BIT))[0] == 0
    assert encoder.state()["residual"][0] == pytest.approx(0.25)


def test_going_raw_sends_what_was_left() -> None:
    encoder = KeyEncoder("w", 32, F4)
    push(encoder, floats(0.375), TWO_BIT)
    (chunk,) = push(encoder, floats(1), RAW)
    assert chunk.codec == "none"
    assert (received(encoder, [chunk]) == 1.375).all()
    assert encoder.state() == {}
    assert (received(encoder, push(encoder, floats(1), RAW)) == 1).all()


def test_a_codec_without_memory_takes_what_was_left() -> None:
    encoder = KeyEncoder("w", 32, F4)
    push(encoder, floats(0.375), TWO_BIT)
    assert received(encoder, push(encoder, floats(0.25), NO_FEEDBACK))[0] == 0.5
    assert encoder.state() == {}


def test_without_feedback_small_gradients_are_lost() -> None:
    encoder = KeyEncoder("w", 32, F4)
    for _ in range(5):
        assert not received(encoder, push(encoder, floats(0.4), NO_FEEDBACK)).any()
    assert encoder.state() == {}


def test_flushing_half_precision_stays_finite() -> None:
    encoder = KeyEncoder("w", 32, np.dtype(np.float16))
    push(encoder, floats(60000).astype(np.float16), TWO_BIT)
    assert (received(encoder, push(encoder, floats(60000).astype(np.float16), RAW)) == 65504).all()


def test_warm_up_rounds_are_raw() -> None:
    encoder, params = KeyEncoder("w", 32, F4), parse_params({"type": "2bit", "warmup_rounds": 2})
    codecs = [push(encoder, floats(1), params, round)[0].codec for round in (1, 2, 3, 4)]
    assert codecs == ["none", "none", "2bit", "2bit"]


def test_earlier_pushes_count_for_the_warm_up_and_for_nothing_else() -> None:
    encoder, params = KeyEncoder("w", 32, F4), parse_params({"type": "2bit", "warmup_rounds": 2})
    encoder.earlier = 1
    assert [push(encoder, floats(1), params, round)[0].codec for round in (1, 2)] == ["none", "2bit"]
    assert encoder.prepare(floats(1), params, 3).round == 3
    encoder.earlier = -5
    assert push(encoder, floats(1), params, 7)[0].codec == "none"


@pytest.mark.parametrize(
    ("n", "dtype", "codec"),
    [(1, F4, "none"), (2, F4, "2bit"), (2, np.dtype(np.float16), "none"), (3, np.dtype(np.float16), "2bit")],
)
def test_a_chunk_that_would_not_shrink_is_raw(n: int, dtype: Any, codec: str) -> None:
    encoder = KeyEncoder("w", n, dtype)
    (chunk,) = push(encoder, np.ones(n, dtype))
    assert chunk.codec == codec
    assert chunk.nbytes <= chunk.raw_nbytes


def test_only_the_short_last_chunk_is_raw() -> None:
    encoder = KeyEncoder("w", 65, F4, chunk_elements=64)
    assert [chunk.codec for chunk in push(encoder, np.ones(65, np.float32))] == ["2bit", "none"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nothing_changes_when_a_gradient_is_refused(bad: float) -> None:
    encoder = KeyEncoder("w", 1000, F4, rank=3, chunk_elements=256)
    push(encoder, np.full(1000, 0.3, np.float32))
    before = encoder.state()["residual"]
    gradient = np.full(1000, 0.3, np.float32)
    gradient[[5, 999]] = bad
    with pytest.raises(NonFiniteError, match=r"key 'w', rank 3: 2 of 1000 elements") as raised:
        encoder.prepare(gradient, TWO_BIT)
    assert (raised.value.key, raised.value.rank, raised.value.count) == ("w", 3, 2)
    assert encoder.state()["residual"].tobytes() == before.tobytes()
    assert (received(encoder, push(encoder, np.full(1000, 0.3, np.float32))) == 0.5).all()


def test_what_float32_cannot_hold_is_refused() -> None:
    with pytest.raises(NonFiniteError, match="1 of 32"):
        KeyEncoder("w", 32, np.dtype(np.float64)).prepare(np.array([1e300] + 31 * [0.0]), TWO_BIT)
    KeyEncoder("w", 32, np.dtype(np.float64)).prepare(np.array([1e300] + 31 * [0.0]), RAW)


def test_a_sum_with_the_residual_that_overflows_is_refused() -> None:
    encoder = KeyEncoder("w", 32, F4)
    push(encoder, floats(3e38, 1))
    with pytest.raises(NonFiniteError, match="16 of 32"):
        encoder.prepare(floats(3e38, 1), TWO_BIT)
    push(encoder, floats(-1e38, 1))
    assert encoder.residual.bound == pytest.approx(2e38, rel=1e-6)  # counted anew, so the next check is cheap
    assert np.isfinite(encoder.state()["residual"]).all()


def test_propagate_sends_the_chunk_raw_and_only_that_one() -> None:
    encoder = KeyEncoder("w", 128, F4, chunk_elements=64)
    push(encoder, np.full(128, 0.375, np.float32))
    gradient = np.full(128, 0.25, np.float32)
    gradient[7] = np.nan
    chunks = push(encoder, gradient, PROPAGATE)
    assert [chunk.codec for chunk in chunks] == ["none", "2bit"]
    out = received(encoder, chunks)
    assert np.flatnonzero(np.isnan(out)).tolist() == [7]
    assert (out[:7] == 0.625).all()
    assert (out[64:] == 0.5).all()
    assert encoder.state()["residual"].tolist() == [0] * 64 + [0.125] * 64


def test_state_is_saved_and_loaded() -> None:
    encoder, other = KeyEncoder("w", 64, F4, chunk_elements=32), KeyEncoder("w", 64, F4)
    push(encoder, np.resize(floats(0.4, -3), 64))
    other.load_state(encoder.state())
    own, expected = push(other, np.zeros(64, np.float32)), push(encoder, np.zeros(64, np.float32))
    assert received(other, own).tobytes() == received(encoder, expected).tobytes()
    other.reset()
    assert other.state() == {}
    assert not received(other, push(other, np.zeros(64, np.float32))).any()


@pytest.mark.parametrize("saved", [np.zeros(63, np.float32), np.full(64, np.nan, np.float32)])
def test_a_foreign_state_is_refused(saved: Any) -> None:
    encoder = KeyEncoder("w", 64, F4)
    push(encoder, np.resize(floats(0.4), 64))
    with pytest.raises(CheckpointError, match="key 'w'"):
        encoder.load_state({"residual": saved})
    assert encoder.state()["residual"][0] == np.float32(0.4)


class CountingParams(Params, frozen=True, tag="counting"):
    """A codec whose size depends on the values."""


class Counting(NoneCodec):
    """Sends the values at even places raw, and a number of bytes to pad; counts its calls in its state."""

    params_type: ClassVar[type[Params]] = CountingParams
    feedback: ClassVar[bool] = True
    pad: ClassVar[int] = 0

    def __init__(self, params: Any = None) -> None:
        self.params = params or CountingParams()

    def encode(self, x: Any, state: State | None, ctx: Context) -> tuple[Payload, Mapping[str, Any]]:
        calls = 1 + (state["calls"] if state else 0)
        data = np.concatenate([x[::2].copy().view(np.uint8), np.zeros(self.pad, np.uint8)])
        return Payload(data), {"calls": calls}

    def decode_add(self, payload: Payload, out: Any, ctx: Context) -> None:
        out[::2] += payload.data[: 4 * -(-ctx.n // 2)].view(np.float32)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> type[Counting]:
    from kvstore.compression import registry

    monkeypatch.setitem(registry._CODECS, "counting", Counting)
    monkeypatch.setattr(Counting, "pad", 0)
    return Counting


def test_any_codec_gets_feedback_and_keeps_its_state(counting: type[Counting]) -> None:
    encoder = KeyEncoder("w", 64, F4, chunk_elements=32)
    push(encoder, np.full(64, 1, np.float32), CountingParams())
    push(encoder, np.full(64, 1, np.float32), CountingParams())
    state = encoder.state()
    assert state["residual"].tolist() == [0, 2] * 32
    assert (state["state/counting/0/calls"], state["state/counting/32/calls"]) == (2, 2)
    other = KeyEncoder("w", 64, F4, chunk_elements=32)
    other.load_state(state)
    push(other, np.full(64, 1, np.float32), CountingParams())
    assert other.state()["state/counting/0/calls"] == 3
    push(other, np.full(64, 1, np.float32), TWO_BIT)
    assert set(other.state()) == {"residual"}  # another codec starts from nothing, the residual stays


def test_a_codec_of_whole_keys_takes_and_leaves_what_chunks_left(
    counting: type[Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "unit", "key")
    encoder = KeyEncoder("w", 100, F4, chunk_elements=32)
    push(encoder, np.full(100, 0.25, np.float32), TWO_BIT)
    (chunk,) = push(encoder, np.full(100, 1, np.float32), CountingParams())
    assert (chunk.index, chunk.offset, chunk.n) == (0, 0, 100)
    assert chunk.payload.data.view(np.float32).tolist() == [1.25] * 50
    assert encoder.state()["residual"].tolist() == [0, 1.25] * 50
    assert received(encoder, push(encoder, np.zeros(100, np.float32), RAW)).tolist() == [0, 1.25] * 50


def test_float64_goes_raw_in_full_precision() -> None:
    encoder = KeyEncoder("w", 32, np.dtype(np.float64))
    push(encoder, np.full(32, 0.25), TWO_BIT)
    assert (received(encoder, push(encoder, np.full(32, 1 + 2.0**-40), RAW)) == 1.25 + 2.0**-40).all()


def test_an_encoding_that_grows_is_replaced_by_raw(counting: type[Counting], monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = KeyEncoder("w", 32, F4)
    push(encoder, floats(1), CountingParams())
    monkeypatch.setattr(counting, "pad", 64)
    (chunk,) = push(encoder, floats(1), CountingParams())
    assert chunk.codec == NoneParams().type
    assert received(encoder, [chunk]).tolist() == [1, 2] * 16
    assert encoder.state() == {"state/counting/0/calls": 1}  # the codec's state is that of what was sent
