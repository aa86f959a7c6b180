"""EDEN and DRIVE: error and bias as published, exact sizes, signs of their own, hostile bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.compression.codec import Context, Payload
from kvstore.compression.eden import CENTROIDS, Drive, Eden, EdenParams
from kvstore.compression.philox import Purpose, stream_key
from kvstore.errors import ParameterError, PayloadError


def decoded(codec: Eden, x: Any, ctx: Context) -> Any:
    payload, _ = codec.encode(x, None, ctx)
    out = np.zeros(ctx.n, np.float32)
    type(codec)().decode_add(payload, out, ctx)
    return out


@pytest.mark.parametrize(
    ("codec", "expected"),
    [(Drive(), np.pi / 2 - 1), (Eden(EdenParams(bits=1)), 0.571), (Eden(), 0.133), (Eden(EdenParams(bits=3)), 0.0358),
     (Eden(EdenParams(bits=4)), 0.0096)],
)  # fmt: skip
def test_the_error_is_that_of_the_best_levels_for_a_normal(codec: Eden, expected: float) -> None:
    """1 / (1 - D) - 1 for a distortion D of Max's quantiser of N(0, 1), the price of being unbiased."""
    x = np.random.default_rng(1).lognormal(size=1 << 17).astype(np.float32)  # anything but normal
    error = np.square(decoded(codec, x, Context("w", x.size)) - x).sum() / np.square(x).sum()
    assert error == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("codec", [Drive(), Eden()])
def test_errors_average_out_over_rounds(codec: Eden) -> None:
    """Without a bias, the error of the mean of k rounds is a k-th of that of one."""
    x, rounds = np.random.default_rng(2).standard_normal(512).astype(np.float32), 500
    mean = sum(decoded(codec, x, Context("w", 512, round=round)) for round in range(rounds)) / rounds
    error = np.square(mean - x).sum() / np.square(x).sum()
    single = np.square(decoded(codec, x, Context("w", 512)) - x).sum() / np.square(x).sum()
    assert error < 1.5 * single / rounds


@pytest.mark.parametrize(
    ("n", "block", "codes", "blocks"),
    [(0, 8, 0, 0), (1, 8, 1, 1), (3, 8, 4, 1), (8, 8, 8, 1), (9, 8, 9, 2), (13, 8, 16, 2), (50890, 4096, 51200, 13)],
)
def test_padding_is_exact(n: int, block: int, codes: int, blocks: int) -> None:
    for bits in (1, 2, 3, 4):
        codec = Eden(EdenParams(bits=bits, block=block))
        size = 4 * blocks + bits * -(-codes // 8)
        x = np.ones(n, np.float32)
        assert codec.max_bytes(n, x.dtype) == size == codec.encode(x, None, Context("w", n))[0].nbytes


def test_workers_rounds_and_seeds_rotate_differently() -> None:
    x = np.random.default_rng(3).standard_normal(256).astype(np.float32)
    ctxs = [Context("w", 256), Context("w", 256, rank=1), Context("w", 256, round=2), Context("w", 256, seed=1),
            Context("v", 256)]  # fmt: skip
    payloads = [Eden().encode(x, None, ctx)[0] for ctx in (*ctxs, ctxs[0])]
    assert len({payload.data.tobytes() for payload in payloads}) == len(ctxs)
    assert payloads[0].data.tobytes() == payloads[-1].data.tobytes()
    assert payloads[1].meta["stream"] == stream_key(0, Purpose.ROTATION, 1, "w", 1)


def test_errors_of_workers_average_out() -> None:
    x = np.random.default_rng(4).standard_normal(4096).astype(np.float32)
    mean = sum(decoded(Drive(), x, Context("w", 4096, rank=rank)) for rank in range(16)) / 16
    error = np.square(mean - x).sum() / np.square(x).sum()
    assert error == pytest.approx((np.pi / 2 - 1) / 16, rel=0.15)


def test_centroids_are_their_intervals_means() -> None:
    z = np.random.default_rng(5).standard_normal(1_000_000)
    for centroids in CENTROIDS.values():
        place = np.searchsorted((centroids[1:] + centroids[:-1]) / 2, z)
        means = [z[place == i].mean() for i in range(len(centroids))]
        assert np.allclose(means, centroids, atol=0.01)


@pytest.mark.parametrize(
    "change",
    [{"stream": -1}, {"stream": 2**64}, {"stream": 1.0}, {"stream": True}, {"bits": 5}, {"bits": 0}, {"block": 100},
     {"block": 2**40}, {"block": 4}],
)  # fmt: skip
def test_meta_that_lies_is_refused(change: dict[str, Any]) -> None:
    ctx = Context("w", 100)
    payload, _ = Eden().encode(np.ones(100, np.float32), None, ctx)
    with pytest.raises(PayloadError):
        Eden().check(Payload(payload.data, {**payload.meta, **change}), ctx)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_scales_that_are_none_are_refused(scale: float) -> None:
    ctx = Context("w", 100)
    payload, _ = Eden().encode(np.ones(100, np.float32), None, ctx)
    data = payload.data.copy()
    data.view(np.uint8)[:4].view(np.float32)[0] = scale
    with pytest.raises(PayloadError):
        Eden().check(Payload(data, payload.meta), ctx)


def test_blocks_are_powers_of_two() -> None:
    with pytest.raises(ParameterError, match="power of two"):
        EdenParams(block=1000)
