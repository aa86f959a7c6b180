"""The 2bit codec over its kernels: payloads, sums, hostile bytes, odd accumulators."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore.compression.codec import Accumulating, Codec, Context, DecodesInto, FusedFeedback, Payload
from kvstore.compression.registry import codec_named
from kvstore.compression.twobit import TwoBit, TwoBitParams
from kvstore.errors import PayloadError


def encoded(values: list[float], threshold: float = 0.5) -> tuple[Payload, Context]:
    x = np.array(values, np.float32)
    ctx = Context("w", x.size)
    payload, state = TwoBit(TwoBitParams(threshold=threshold)).encode(x, None, ctx)
    assert state is None
    return payload, ctx


def decoded(payload: Payload, ctx: Context) -> list[float]:
    out = np.zeros(ctx.n, np.float32)
    codec_named("2bit").decode_add(payload, out, ctx)
    values: list[float] = out.tolist()
    return values


def test_interfaces() -> None:
    codec: Any = TwoBit()
    for protocol in (Codec, FusedFeedback, Accumulating, DecodesInto):
        assert isinstance(codec, protocol)


def test_one_quantum_per_element_and_edges_fire() -> None:
    payload, ctx = encoded([0.5, -0.5, 0.49, -0.49, 2.25, -9, 0])
    assert decoded(payload, ctx) == [0.5, -0.5, 0, 0, 0.5, -0.5, 0]
    assert payload.meta == {"threshold": 0.5}
    assert payload.nbytes == 4


def test_encode_leaves_its_input() -> None:
    x = np.array([2.0, -2.0], np.float32)
    TwoBit().encode(x, None, Context("w", 2))
    assert x.tolist() == [2.0, -2.0]


def test_the_threshold_travels_with_the_payload() -> None:
    payload, ctx = encoded([9, -9], threshold=2.0)
    assert decoded(payload, ctx) == [2, -2]  # by a decoder of default parameters


def test_feedback_updates_the_residual_in_place() -> None:
    codec, residual, ctx = TwoBit(), np.zeros(2, np.float32), Context("w", 2)
    seen = []
    for x in ([2.25, -0.25], [0, -0.25], [0, 0], [0, 0], [0, 0]):
        payload, _ = codec.encode_feedback(np.array(x, np.float32), residual, None, ctx)
        seen.append(decoded(payload, ctx))
    assert seen == [[0.5, 0], [0.5, -0.5], [0.5, 0], [0.5, 0], [0, 0]]
    assert residual.tolist() == [0.25, 0]


def test_equal_thresholds_are_counted_and_rounded_once() -> None:
    payload, ctx = encoded([1, -1, 0], threshold=0.1)
    out = np.zeros(3, np.float32)
    TwoBit().accumulate([payload] * 3, out, [ctx] * 3)
    once = np.float32(3) * np.float32(0.1)
    assert out.tolist() == [once, -once, 0]


def test_more_workers_than_one_count_takes() -> None:
    payload, ctx = encoded([1, -1])
    out = np.zeros(2, np.float32)
    TwoBit().accumulate([payload] * 300, out, [ctx] * 300)
    assert out.tolist() == [150, -150]


def test_mixed_thresholds_are_added_in_order() -> None:
    parts = [encoded([1, -1], threshold) for threshold in (0.1, 0.7, 0.1, 0.9)]
    out, expected = np.zeros(2, np.float32), np.zeros(2, np.float32)
    TwoBit().accumulate([payload for payload, _ in parts], out, [ctx for _, ctx in parts])
    for threshold in (0.1, 0.7, 0.1, 0.9):
        expected += np.array([1, -1], np.float32) * np.float32(threshold)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_accumulators_of_other_dtypes(dtype: type) -> None:
    payload, ctx = encoded([1, -1, 0])
    out: Any = np.array([8, 8, 8], dtype)
    TwoBit().accumulate([payload, payload], out, [ctx, ctx])
    assert out.astype(float).tolist() == [9, 7, 8]
    TwoBit().decode_into(payload, out, ctx)
    assert out.astype(float).tolist() == [0.5, -0.5, 0]


def test_strided_and_unaligned_accumulators() -> None:
    payload, ctx = encoded([1, -1, 0])
    memory = np.full(6, 8, np.float32)
    TwoBit().decode_add(payload, memory[::2], ctx)
    TwoBit().decode_into(payload, memory[1::2], ctx)
    assert memory.tolist() == [8.5, 0.5, 7.5, -0.5, 8, 0]
    odd = np.zeros(13, np.uint8)[1:].view(np.float32)
    TwoBit().decode_add(payload, odd, ctx)
    assert odd.tolist() == [0.5, -0.5, 0]


@pytest.mark.parametrize(
    ("data", "meta"),
    [
        (b"", {"threshold": 0.5}),
        (b"1234", {"threshold": 0.5}),
        (b"123456789", {"threshold": 0.5}),
        (b"12345678", {}),
        (b"12345678", {"threshold": "0.5"}),
        (b"12345678", {"threshold": 0}),
        (b"12345678", {"threshold": -1.0}),
        (b"12345678", {"threshold": float("nan")}),
        (b"12345678", {"threshold": float("inf")}),
        (b"12345678", {"threshold": 1e39}),
    ],
)
def test_a_payload_that_breaks_the_format_changes_nothing(data: bytes, meta: dict[str, Any]) -> None:
    ctx, codec = Context("w", 20, rank=3), TwoBit()
    good = Payload(b"\xff" * 8, {"threshold": 0.5})
    out = np.full(20, 7, np.float32)
    with pytest.raises(PayloadError, match="key 'w', chunk 0, rank 3"):
        codec.check(Payload(data, meta), ctx)
    with pytest.raises(PayloadError):
        codec.accumulate([good, Payload(data, meta)], out, [ctx, ctx])
    with pytest.raises(PayloadError):
        codec.decode_into(Payload(data, meta), out, ctx)
    assert (out == 7).all()


def test_any_bytes_of_the_right_number_decode(rng: np.random.Generator) -> None:
    data = rng.bytes(1024)
    out = np.zeros(4096, np.float32)
    TwoBit().decode_add(Payload(data, {"threshold": 0.5}), out, Context("w", 4096))
    assert set(np.unique(out)) <= {-0.5, 0.0, 0.5}


def test_a_million_floats_take_a_sixteenth() -> None:
    n = 10**6
    payload, _ = TwoBit().encode(np.ones(n, np.float32), None, Context("w", n))
    assert payload.nbytes * 16 == 4 * n
