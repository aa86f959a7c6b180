"""Sums in rank order, bit for bit, whatever the order of arrival and the mix of encodings."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore.compression.codec import Context, Payload
from kvstore.compression.registry import codec_named
from kvstore.errors import PayloadError
from kvstore.server.aggregate import KEPT_WHERE_IT_ARRIVED, Aggregate, Array, Encoded


def raw(rank: int, values: Any, dtype: Any = np.float32) -> Encoded:
    array = np.asarray(values, dtype)
    return Encoded(
        codec_named("none"), Payload(array.tobytes()), Context("w", array.size, rank=rank, dtype=array.dtype)
    )


def two_bit(rank: int, codes: bytes, threshold: float, n: int = 4, dtype: Any = np.float32) -> Encoded:
    payload = Payload(codes, {"threshold": threshold})
    return Encoded(codec_named("2bit"), payload, Context("w", n, rank=rank, dtype=np.dtype(dtype)))


# One byte holds four elements, the first one in the highest bits: 11 is plus, 10 minus the threshold, 00 nothing.
PLUS, MINUS, NONE, MIXED = b"\xff\0\0\0", b"\xaa\0\0\0", b"\0\0\0\0", b"\xe0\0\0\0"  # MIXED: + - 0 0


def total(pushes: list[Encoded], dtype: Any = np.float32, **how: Any) -> Array:
    aggregate = Aggregate(np.dtype(dtype))
    for push in pushes:
        aggregate.add(push)
    return aggregate.finish(**how)


ORDER_MATTERS = [
    ([1e8, 1.0, -1e8, 0.5], 0.5),  # ((1e8 + 1) - 1e8) + 0.5; float32 has no 1e8 + 1
    ([1.0, -1e8, 1e8, 0.5], 0.5),
    ([-1e8, 1e8, 1.0, 0.5], 1.5),
]


@pytest.mark.parametrize(("by_rank", "expected"), ORDER_MATTERS)
def test_raw_sum_is_taken_in_rank_order(by_rank: list[float], expected: float) -> None:
    pushes = [raw(rank, [value]) for rank, value in enumerate(by_rank)]
    for arrival in itertools.permutations(pushes):
        assert total(list(arrival)).tolist() == [expected]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([PLUS, PLUS, MINUS], [0.5] * 4),
        ([MIXED, NONE, NONE], [0.5, -0.5, 0, 0]),
        ([MIXED, MIXED, PLUS], [1.5, -0.5, 0.5, 0.5]),
    ],
)
def test_two_bit_sum(codes: list[bytes], expected: list[float]) -> None:
    pushes = [two_bit(rank, code, 0.5) for rank, code in enumerate(codes)]
    for arrival in itertools.permutations(pushes):
        assert total(list(arrival)).tolist() == expected


def test_two_bit_codes_are_added_as_integers() -> None:
    """Ten times 0.1 as integers, times the threshold: rounded once. Added one by one, float32 gives 1.0000001."""
    sequential = np.float32(0)
    for _ in range(10):
        sequential += np.float32(0.1)
    summed = total([two_bit(rank, PLUS, 0.1) for rank in range(10)])
    assert summed[0] == np.float32(10) * np.float32(0.1) == 1.0
    assert sequential != 1.0


@pytest.mark.parametrize("kinds", list(itertools.product("rt", repeat=4)))
def test_mixed_rounds_do_not_depend_on_arrival(kinds: tuple[str, ...]) -> None:
    values = [1e8, 3.0, -1e8, 0.25]
    pushes = [
        raw(rank, [values[rank]] * 4) if kind == "r" else two_bit(rank, MIXED, 3.0) for rank, kind in enumerate(kinds)
    ]
    results = {total(list(arrival)).tobytes() for arrival in itertools.permutations(pushes)}
    assert len(results) == 1


def test_mixed_round_by_hand() -> None:
    pushes = [raw(0, [1, 2, 3, 4]), two_bit(1, MIXED, 0.5), two_bit(2, PLUS, 0.5), raw(3, [10, 10, 10, 10])]
    assert total(pushes[::-1]).tolist() == [12.0, 12.0, 13.5, 14.5]


def test_thresholds_may_differ_within_a_round() -> None:
    assert total([two_bit(0, PLUS, 0.5), two_bit(1, MIXED, 2.0)]).tolist() == [2.5, -1.5, 0.5, 0.5]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: Any) -> None:
    """2048 + 1 + 1: float16 and bfloat16 lose the ones."""
    result = total([raw(rank, [value, value], dtype) for rank, value in enumerate([2048, 1, 1])], dtype)
    assert result.dtype == np.float32
    assert result.tolist() == [2050.0, 2050.0]


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (np.int8, [100, 100, 1], -55),
        (np.uint64, [2**63, 2**63 - 1, 0], 2**64 - 1),
        (np.bool_, [False, True, True], True),
    ],
)
def test_integers_wrap_and_bools_are_ored(dtype: Any, values: list[int], expected: int) -> None:
    result = total([raw(rank, [value], dtype) for rank, value in enumerate(values)], dtype)
    assert (result.dtype, result.tolist()) == (np.dtype(dtype), [expected])


def test_float64_keeps_its_precision() -> None:
    assert total([raw(0, [1e16], np.float64), raw(1, [2.0], np.float64)], np.float64).tolist() == [1e16 + 2]


def test_empty_chunk() -> None:
    assert total([raw(0, []), raw(1, [])]).tolist() == []


@pytest.mark.parametrize("size", [8, KEPT_WHERE_IT_ARRIVED])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_received_bytes_are_never_written_to(size: int, count: int) -> None:
    frames = [bytearray(np.full(size // 4, rank + 1, np.float32).tobytes()) for rank in range(count)]
    before = [bytes(frame) for frame in frames]
    pushes = [raw(rank, np.frombuffer(frame, np.float32)) for rank, frame in enumerate(frames)]
    pushes = [push._replace(payload=Payload(frame)) for push, frame in zip(pushes, frames, strict=True)]
    result = total(pushes)
    assert set(result) == {sum(range(1, count + 1))}
    result[:] = 0
    assert [bytes(frame) for frame in frames] == before


def test_single_large_push_may_stay_where_it_arrived() -> None:
    frame = np.ones(KEPT_WHERE_IT_ARRIVED // 4, np.float32).tobytes()
    push = raw(0, np.frombuffer(frame, np.float32))._replace(payload=Payload(frame))
    assert np.shares_memory(total([push], writable=False), np.frombuffer(frame, np.uint8))
    assert not np.shares_memory(total([push]), np.frombuffer(frame, np.uint8))


@pytest.mark.parametrize(
    "bad",
    [
        raw(1, [1.0])._replace(payload=Payload(b"123")),
        raw(1, [1.0])._replace(payload=Payload(b"")),
        two_bit(1, b"\xff\0\0", 0.5),
        two_bit(1, PLUS + b"\0", 0.5),
        two_bit(1, PLUS, 0.0),
        two_bit(1, PLUS, float("nan")),
        two_bit(1, PLUS, float("inf")),
        two_bit(1, PLUS, -0.5),
        two_bit(1, PLUS, 0.5)._replace(payload=Payload(PLUS, {})),
        two_bit(1, PLUS, 0.5)._replace(payload=Payload(PLUS, {"threshold": "big"})),
    ],
)
def test_bad_payload_changes_nothing(bad: Encoded) -> None:
    aggregate = Aggregate(np.dtype(np.float32))
    aggregate.add(raw(0, [2.0] * bad.context.n))
    with pytest.raises(PayloadError) as caught:
        aggregate.add(bad)
    assert (caught.value.key, caught.value.rank) == ("w", 1)
    assert 1 not in aggregate
    aggregate.add(raw(1, [3.0] * bad.context.n))
    assert 1 in aggregate
    assert aggregate.ranks == {0, 1}
    assert set(aggregate.finish()) == {5.0}
