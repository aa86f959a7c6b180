"""The largest elements, one of every stratum, and gaps: twins agree, hostile gaps are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.compression import sparse_numba
from kvstore.compression import sparse_numpy as reference
from kvstore.errors import ArrayError

LENGTHS = (1, 2, 10, 1000, 8191, 8192, 20_000, 300_000)
KEY = 0x123456789ABCDEF0
Load = Callable[[str], Any]


def arrays(rng: np.random.Generator, n: int) -> list[Any]:
    """Data that thresholds from a sample trip over: constant, few values, mostly zeros, periodic."""
    normal, sampled = rng.standard_normal(n), np.arange(n) % 64 == 0
    kinds = [normal, np.ones(n), np.zeros(n), rng.integers(-2, 3, n), normal * (rng.random(n) < 0.001)]
    kinds += [np.where(sampled, 100, normal), np.where(sampled, 0, normal), normal * 1e-42, np.sort(normal)]
    return [kind.astype(np.float32) for kind in kinds]


def test_selection_is_exact_and_ties_go_to_the_lowest_index(twin_of: Load, rng: np.random.Generator) -> None:
    twin = twin_of("sparse")
    for n in LENGTHS:
        for x in arrays(rng, n):
            for k in {0, 1, n // 100, n // 2, n}:
                order = np.lexsort((np.arange(n), -np.abs(x.astype(np.float64))))[:k]
                expected = np.sort(order[x[order] != 0])
                for select in (reference.select_largest, twin.select_largest):
                    own = select(x, k)
                    assert own.dtype == np.int64
                    assert own.tolist() == expected.tolist(), (n, k)


def test_strata_of_twins(twin_of: Load, rng: np.random.Generator) -> None:
    twin = twin_of("sparse")
    for n in (*LENGTHS[:5], 0):
        x = rng.standard_normal(n).astype(np.float32)
        for k in {0, min(1, n), n // 100, n // 3, n}:
            for multiply in (False, True):
                values = [np.full(k, 7, np.float32) for _ in range(2)]
                sums = [np.full(n, 3, np.float32) for _ in range(2)]
                for one, own, out in zip((reference, twin), values, sums, strict=True):
                    one.gather_strata(x, KEY, 9, multiply, own)
                    one.scatter_strata_add(values[0], KEY, 9, out)
                assert values[0].tobytes() == values[1].tobytes(), (n, k)
                assert sums[0].tobytes() == sums[1].tobytes(), (n, k)


def test_scattering_of_twins(twin_of: Load) -> None:
    indices, values = np.array([0, 70_000, 99_999]), np.array([1, 2, 3], np.float32)
    for one in (reference, twin_of("sparse")):
        out = np.ones(100_000, np.float32)
        one.scatter_add(values, indices, out)
        assert out[indices].tolist() == [2, 3, 4]
        assert out.sum() == 100_006


@pytest.mark.parametrize(("n", "k"), [(1000, 10), (1003, 10), (7, 7), (100, 99)])
def test_each_stratum_gives_one_element_and_each_element_has_its_chance(n: int, k: int) -> None:
    counts, draws = np.zeros(n), 2000
    for draw in range(draws):
        indices, length = reference.strata(n, k, KEY + draw, 0)
        edges = np.concatenate([[0], np.cumsum(length)])
        assert edges[-1] == n
        assert length.max() - length.min() <= 1
        assert ((edges[:-1] <= indices) & (indices < edges[1:])).all()
        counts[indices] += 1
    chance = 1 / np.repeat(length, length)
    assert (np.abs(counts / draws - chance) <= 6 * np.sqrt(chance / draws)).all()


def test_masks_of_keys_and_chunks_differ() -> None:
    first = reference.strata(10_000, 100, KEY, 0)[0]
    assert (first == reference.strata(10_000, 100, KEY, 1)[0]).mean() < 0.1
    assert (first == reference.strata(10_000, 100, KEY ^ 1 << 40, 0)[0]).mean() < 0.1


@pytest.mark.parametrize("module", [reference, sparse_numba])
def test_gaps_there_and_back(module: Any, rng: np.random.Generator) -> None:
    for n in (1, 127, 128, 129, 16_385, 2_000_000, 2**31):
        for count in (0, 1, min(n, 100)):
            indices = np.unique(rng.integers(0, n, count))
            data = module.pack_gaps(indices)
            assert data.tobytes() == reference.pack_gaps(indices).tobytes()
            assert module.unpack_gaps(data, indices.size, n).tolist() == indices.tolist()
            wrong = [(data, indices.size + 1, n), (np.append(data, np.uint8(0)), indices.size, n)]
            if indices.size:
                wrong += [(data, indices.size - 1, n), (data[:-1], indices.size, n), (data, indices.size, indices[-1])]
            assert [module.unpack_gaps(*one) for one in wrong] == [None] * len(wrong)


def test_the_bytes_of_gaps() -> None:
    assert reference.pack_gaps(np.array([0, 1, 129, 300])).tolist() == [0, 0, 127, 0x80 | 42, 1]


@pytest.mark.parametrize("module", [reference, sparse_numba])
@pytest.mark.parametrize("data", [[0x80] * 5 + [0], [0xFF] * 4 + [0x7F], [0x80], [0xFF, 0xFF]])
def test_codes_that_are_too_long_too_large_or_cut_are_refused(module: Any, data: list[int]) -> None:
    assert module.unpack_gaps(np.array(data, np.uint8), 1, 1000) is None


@pytest.mark.parametrize("module", [reference, sparse_numba])
def test_any_bytes_are_refused_or_ascending_and_in_range(module: Any, rng: np.random.Generator) -> None:
    accepted = 0
    for _ in range(300):
        data = rng.choice([0, 1, 5, 127, 128, 129, 255], rng.integers(0, 12), p=[0.3, 0.3, 0.2, 0.05, 0.05, 0.05, 0.05])
        found = module.unpack_gaps(data.astype(np.uint8), int(rng.integers(0, 8)), 500)
        expected = reference.unpack_gaps(data.astype(np.uint8), 0 if found is None else found.size, 500)
        if found is not None:
            accepted += 1
            assert expected is not None
            assert found.tolist() == expected.tolist()
            assert (np.diff(found) > 0).all()
            assert ((found >= 0) & (found < 500)).all()
    assert accepted > 10


def test_compiled_scattering_refuses_what_lies_outside() -> None:
    out, values = np.zeros(10, np.float32), np.ones(1, np.float32)
    for index in (-1, 10):
        with pytest.raises(ArrayError):
            sparse_numba.scatter_add(values, np.array([index]), out)
    with pytest.raises(ArrayError):
        sparse_numba.scatter_strata_add(np.ones(11, np.float32), KEY, 0, out)
    with pytest.raises(ArrayError):
        sparse_numba.gather_strata(out, KEY, 0, False, np.ones(11, np.float32))
