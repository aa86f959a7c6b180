"""Rounding at random: every twin gives the bits of the reference, and the mean is what was rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.compression import dithered_numpy as reference
from kvstore.compression.dense_numpy import block_scales, blocks_of, decode_ints_add
from kvstore.compression.kernels_numpy import packed_size

LENGTHS = (0, 1, 7, 8, 9, 63, 64, 65, 511, 513, 5000)
KEY = 0x123456789ABCDEF0
Load = Callable[[str], Any]


def values(rng: np.random.Generator, n: int) -> Any:
    x = (rng.standard_normal(n) * rng.choice([1, 1e-39, 1e30, 1e-7])).astype(np.float32)
    x[rng.random(n) < 0.1] = 0
    x[rng.random(n) < 0.05] = -0.0
    x[64:192] = 0
    if n > 250:
        x[250] = -np.finfo(np.float32).max
    return x


def same_bits(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())


def test_powers_of_two_of_twins(twin_of: Load, rng: np.random.Generator) -> None:
    twin = twin_of("dithered")
    for n in LENGTHS:
        x = values(rng, n)
        exponents = [np.full(n, 7, np.uint8) for _ in range(2)]
        signs = [np.full(blocks_of(n, 8), 7, np.uint8) for _ in range(2)]
        for one, e, s in zip((reference, twin), exponents, signs, strict=True):
            one.encode_natural(x, KEY, 5, e, s)
        assert same_bits(*exponents), n
        assert same_bits(*signs), n
        sums = [np.full(n, 3, np.float32) for _ in range(2)]
        for one, out in zip((reference, twin), sums, strict=True):
            one.decode_natural_add(exponents[0], signs[0], 0.75, out)
        assert same_bits(*sums), n


@pytest.mark.parametrize("clip", [0.0, 1.0, 2.5])
def test_three_values_of_twins(twin_of: Load, clip: float, rng: np.random.Generator) -> None:
    twin = twin_of("dithered")
    for n in LENGTHS:
        for bucket in (64, 512, 1024):
            x = values(rng, n)
            scales = [np.full(blocks_of(n, bucket), 7, np.float32) for _ in range(2)]
            data = [np.full(packed_size(n), 255, np.uint8) for _ in range(2)]
            sums = [np.full(n, 3, np.float32) for _ in range(2)]
            for one, s, d, out in zip((reference, twin), scales, data, sums, strict=True):
                one.ternary_scales(x, bucket, clip, s)
                one.encode_ternary(x, scales[0], bucket, KEY, 5, d)
                one.decode_ternary_add(data[0], scales[0], bucket, out)
            for pair in (scales, data, sums):
                assert same_bits(*pair), (n, bucket)


def test_integers_of_twins(twin_of: Load, rng: np.random.Generator) -> None:
    twin = twin_of("dithered")
    for n in LENGTHS:
        for block in (64, 256):
            x, scales = values(rng, n), np.empty(blocks_of(n, block), np.float32)
            block_scales(x, block, 127, scales)
            codes = [np.full(n, 7, np.int8) for _ in range(2)]
            for one, c in zip((reference, twin), codes, strict=True):
                one.round_ints(x, scales, block, KEY, 5, c)
            assert same_bits(*codes), (n, block)


def test_the_mean_is_what_was_rounded(rng: np.random.Generator) -> None:
    x = rng.standard_normal(100).astype(np.float32)
    draws = 4000
    totals = np.zeros((3, 100))
    e, s, t, c = (
        np.empty(100, np.uint8),
        np.empty(13, np.uint8),
        np.empty(packed_size(100), np.uint8),
        np.empty(100, np.int8),
    )
    scales, steps = np.empty(2, np.float32), np.empty(2, np.float32)
    reference.ternary_scales(x, 64, 0, scales)
    block_scales(x, 64, 127, steps)
    for draw in range(draws):
        out = np.zeros((3, 100), np.float32)
        reference.encode_natural(x, KEY + draw, 0, e, s)
        reference.decode_natural_add(e, s, 1, out[0])
        reference.encode_ternary(x, scales, 64, KEY + draw, 0, t)
        reference.decode_ternary_add(t, scales, 64, out[1])
        reference.round_ints(x, steps, 64, KEY + draw, 0, c)
        decode_ints_add(c, steps, 64, out[2])
        totals += out
    widest = (
        np.abs(x) / 2,
        np.repeat(scales, 64)[:100] / 2,
        np.repeat(steps, 64)[:100] / 2,
    )  # a bound on the deviation
    for total, deviation in zip(totals, widest, strict=True):
        assert (np.abs(total / draws - x) <= 6 * deviation / draws**0.5).all()


def test_the_clip_limits_the_scale() -> None:
    x = np.full(64, 1, np.float32)
    x[0] = 100
    scales = np.empty(1, np.float32)
    reference.ternary_scales(x, 64, 0, scales)
    assert scales[0] == 100
    reference.ternary_scales(x, 64, 2.5, scales)
    assert scales[0] == pytest.approx(2.5 * np.sqrt(np.mean(x.astype(np.float64) ** 2)), rel=1e-6)
