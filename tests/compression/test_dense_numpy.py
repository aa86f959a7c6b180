"""Small floats, scaled blocks and one bit: every twin gives the bits of the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore.compression import dense_numpy as reference
from kvstore.compression.dense_numpy import BF16, E4M3, E5M2, FP16, Format, blocks_of, lane_sums
from kvstore.errors import ArrayError

KINDS = {FP16: np.float16, BF16: ml_dtypes.bfloat16, E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
LENGTHS = (0, 1, 7, 63, 64, 65, 511, 513, 5000)
Load = Callable[[str], Any]


def values(rng: np.random.Generator, n: int) -> Any:
    """Every scale of float32, zeros of both signs, a block of zeros, the largest value."""
    scale = 10.0 ** rng.uniform(-44, 37, n)
    if rng.random() < 0.7:
        scale[:] = rng.choice([1, 1e-40, 1e30, 1e-36, 6e4, 1e-7])
    x = (rng.standard_normal(n) * scale).astype(np.float32)
    x[rng.random(n) < 0.2] = 0
    x[rng.random(n) < 0.05] = -0.0
    x[64:192] = 0
    if n > 250:
        x[250] = -np.finfo(np.float32).max
    return x


def same_bits(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())


@pytest.mark.parametrize("kind", KINDS)
def test_small_floats_are_those_of_other_libraries(kind: Format, rng: np.random.Generator) -> None:
    every = np.arange(2 ** (8 * kind.nbytes)).astype(kind.dtype)
    finite = every[(every & kind.magnitude) <= kind.top]
    own: Any = finite.view(KINDS[kind]).astype(np.float32)
    out, one = np.zeros(finite.size, np.float32), np.ones(1, np.float32)
    reference.decode_floats_add(finite, one, finite.size, kind, out)
    assert (out == own).all()
    assert own.max() == kind.largest
    x = np.concatenate(
        [own, *(np.nextafter(own, np.float32(side)) for side in (-np.inf, np.inf)), own[1:] / 2 + own[:-1] / 2]
    )
    x = np.concatenate([x, *(values(rng, 1000) for _ in range(5))])
    x = x[np.isfinite(x)]
    codes = np.empty(x.size, kind.dtype)
    reference.encode_floats(x, one, x.size, kind, codes)
    expected: Any = np.clip(x, -kind.largest, kind.largest).astype(KINDS[kind])
    assert same_bits(codes, expected.view(kind.dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_small_floats_of_twins(twin_of: Load, kind: Format, rng: np.random.Generator) -> None:
    twin = twin_of("dense")
    for n in LENGTHS:
        for block in (64, 256, max(n, 1)):
            x = values(rng, n)
            scales, own = (np.full(blocks_of(n, block), 9, np.float32) for _ in range(2))
            reference.block_scales(x, block, kind.largest, scales)
            twin.block_scales(x, block, kind.largest, own)
            assert same_bits(scales, own), (n, block)
            codes, coded = (np.full(n, 255, kind.dtype) for _ in range(2))
            reference.encode_floats(x, scales, block, kind, codes)
            twin.encode_floats(x, scales, block, kind, coded)
            assert same_bits(codes, coded), (n, block)
            out, sums = (np.full(n, 3, np.float32) for _ in range(2))
            reference.decode_floats_add(codes, scales, block, kind, out)
            twin.decode_floats_add(codes, scales, block, kind, sums)
            assert same_bits(out, sums), (n, block)
            assert np.isfinite(out).all()


def test_integers_of_twins(twin_of: Load, rng: np.random.Generator) -> None:
    twin = twin_of("dense")
    for n in LENGTHS:
        for block in (64, 256, 4096):
            x = values(rng, n)
            scales = np.empty(blocks_of(n, block), np.float32)
            reference.block_scales(x, block, 127, scales)
            codes, coded = (np.full(n, 77, np.int8) for _ in range(2))
            reference.encode_ints(x, scales, block, codes)
            twin.encode_ints(x, scales, block, coded)
            assert same_bits(codes, coded), (n, block)
            assert np.abs(codes.astype(int)).max(initial=0) <= 127
            out, sums = (np.full(n, 3, np.float32) for _ in range(2))
            reference.decode_ints_add(codes, scales, block, out)
            twin.decode_ints_add(codes, scales, block, sums)
            assert same_bits(out, sums), (n, block)
            assert np.isfinite(out).all()


@pytest.mark.parametrize("means", [1, 2])
def test_signs_of_twins(twin_of: Load, means: int, rng: np.random.Generator) -> None:
    twin = twin_of("dense")
    for n in (*LENGTHS, 70_000):
        for bucket in (64, 1024, 65536):
            x, start = values(rng, n), values(rng, n) / 4
            residuals = [start.copy() for _ in range(2)]
            scales = [np.full(blocks_of(n, bucket) * means, 9, np.float32) for _ in range(2)]
            bits = [np.full(blocks_of(n, 8), 255, np.uint8) for _ in range(2)]
            x[np.abs(x) > 3e38] = 1e38
            for one, r, s, b in zip((reference, twin), residuals, scales, bits, strict=True):
                one.encode_signs(x, r, bucket, means, s, b)
            for pair in (residuals, scales, bits):
                assert same_bits(*pair), (n, bucket)
            sums = [np.full(n, 3, np.float32) for _ in range(2)]
            for one, out in zip((reference, twin), sums, strict=True):
                one.decode_signs_add(bits[0], scales[0], bucket, means, out)
            assert same_bits(*sums), (n, bucket)


def test_signs_are_the_two_means_of_seide() -> None:
    x, residual = np.array([1, 3, 0, -4, -2, -0.0], np.float32), np.zeros(6, np.float32)
    scales, bits = np.empty(2, np.float32), np.empty(1, np.uint8)
    reference.encode_signs(x, residual, 64, 2, scales, bits)
    assert scales.tolist() == [1, 3]  # the mean of 1, 3, 0, -0 and that of 4, 2
    assert bits.tolist() == [0b11100100]
    assert residual.tolist() == [0, 2, -1, -1, 1, -1]
    reference.encode_signs(x, np.zeros(6, np.float32), 64, 1, scales[:1], bits)
    assert scales[0] == np.float32(10 / 6)


def test_means_of_the_largest_values_stay_finite() -> None:
    x = np.full(65536, np.finfo(np.float32).max, np.float32)
    residual, scales, bits = np.zeros_like(x), np.empty(2, np.float32), np.empty(8192, np.uint8)
    reference.encode_signs(x, residual, 65536, 2, scales, bits)
    assert scales.tolist() == [x[0], 0]
    assert not residual.any()


def test_sums_run_in_lanes() -> None:
    rows = np.zeros((1, 128), np.float32)
    rows[0, [0, 32, 64]] = 2**24, 1, 1
    assert lane_sums(rows).tolist() == [2**24]  # (2^24 + 1) rounded, + 1 rounded again
    rows[0, [32, 96]] = 1, 1
    rows[0, 64] = 0
    assert lane_sums(rows).tolist() == [2**24 + 2]


def test_a_block_too_small_for_its_scale_is_zero() -> None:
    x, scales = np.full(64, 1e-37, np.float32), np.empty(1, np.float32)
    reference.block_scales(x, 64, 127, scales)
    assert scales.tolist() == [0]


@pytest.mark.parametrize("name", ["scales", "codes", "out"])
def test_compiled_kernels_refuse_what_does_not_fit(name: str) -> None:
    from kvstore.compression import dense_numba

    arrays: dict[str, Any] = {"scales": np.ones(2, np.float32), "codes": np.zeros(100, np.uint8)}
    arrays["out"] = np.zeros(100, np.float32)
    dense_numba.decode_floats_add(arrays["codes"], arrays["scales"], 64, E4M3, arrays["out"])
    arrays[name] = arrays[name][:-1].copy()
    with pytest.raises(ArrayError):
        dense_numba.decode_floats_add(arrays["codes"], arrays["scales"], 64, E4M3, arrays["out"])
