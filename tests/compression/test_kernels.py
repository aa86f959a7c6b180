"""All twins of the kernels give the same bits as the NumPy reference and as the recorded MXNet payloads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.compression import kernels
from kvstore.compression import kernels_numpy as reference
from kvstore.compression.kernels_numpy import MOST_SUMMED, packed_size
from kvstore.errors import ArrayError, ConfigError

LENGTHS = [*range(71), 511, 512, 513, 1000, 16384 + 17, 262144]
GOLDEN = Path(__file__).resolve().parent / "golden" / "2bit" / "mxnet-1.9.1"


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Equal in every bit: -0.0 differs from 0.0."""
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def edges(threshold: float, tiny: bool) -> NDArray[np.float32]:
    """Values at the rule's edges: the threshold and its neighbours, zeros, large, denormal."""
    t = np.float32(threshold)
    up, down = np.nextafter(t, np.float32(np.inf)), np.nextafter(t, np.float32(0))
    values = [0.0, -0.0, t, -t, up, -up, down, -down, 2 * t, -2 * t, 1e30, -1e30, 1e6]
    if tiny:
        values += [1e-45, -1e-45, 1.1e-38, -1.1e-38]
    return np.array(values, np.float32)


@pytest.mark.parametrize("threshold", [0.5, 0.1, 3.0e-7])
def test_quantise2_equals_the_reference(twin: Any, rng: np.random.Generator, threshold: float) -> None:
    for n in LENGTHS:
        gradient = (rng.standard_normal(n) * 1.5 * threshold).astype(np.float32)
        special = edges(threshold, tiny=twin.NAME != "cupy")
        places = rng.random(n) < 0.3
        gradient[places] = rng.choice(special, n)[places]
        residual = rng.choice(np.append(special, np.float32(threshold / 3)), n).astype(np.float32)
        residual[np.abs(residual) > 1e20] = 0
        expected_residual, own_residual = residual.copy(), residual.copy()
        expected, own = np.full(packed_size(n), 255, np.uint8), np.full(packed_size(n), 255, np.uint8)
        reference.quantise2(gradient, expected_residual, threshold, expected)
        twin.quantise2(gradient, own_residual, threshold, own)
        assert same_bits(own, expected), n
        assert same_bits(own_residual, expected_residual), n


def test_decode_of_any_bytes_equals_the_reference(twin: Any, rng: np.random.Generator) -> None:
    for n in LENGTHS:
        data = rng.integers(0, 256, packed_size(n), dtype=np.uint8)  # all four codes, 01 too
        start = rng.choice(edges(0.1, tiny=twin.NAME != "cupy"), n).astype(np.float32)
        for name in ("decode2", "decode2_add"):
            own, expected = start.copy(), start.copy()
            getattr(twin, name)(data, 0.1, own)
            getattr(reference, name)(data, 0.1, expected)
            assert same_bits(own, expected), (name, n)


@pytest.mark.parametrize("workers", [1, 2, 8, MOST_SUMMED])
def test_k_way_sum_equals_the_reference_in_any_order(twin: Any, rng: np.random.Generator, workers: int) -> None:
    for n in (0, 1, 33, 1000, 16384 + 17):
        data = [rng.integers(0, 256, packed_size(n), dtype=np.uint8) for _ in range(workers)]
        start = rng.standard_normal(n).astype(np.float32)
        own, expected, shuffled = start.copy(), start.copy(), start.copy()
        twin.decode2_add_many(data, 0.1, own)
        twin.decode2_add_many([data[i] for i in rng.permutation(workers)], 0.1, shuffled)
        reference.decode2_add_many(data, 0.1, expected)
        assert same_bits(own, expected)
        assert same_bits(own, shuffled)


def test_k_way_sum_counts_to_the_last_worker(twin: Any) -> None:
    out = np.zeros(5, np.float32)
    twin.decode2_add_many([np.full(4, 0b11111010, np.uint8)] * MOST_SUMMED, 0.5, out)
    assert out.tolist() == [63.5, 63.5, -63.5, -63.5, 63.5]


def test_code_01_is_nothing(twin: Any) -> None:
    out = np.full(4, 9.0, np.float32)
    twin.decode2(np.array([0b01_11_01_10, 0, 0, 0], np.uint8), 2.0, out)
    assert out.tolist() == [0, 2, 0, -2]


def test_the_documented_bytes(twin: Any) -> None:
    gradient = np.array([0, 2, 0, -2, 2, 0, 0, -2], np.float32)
    out = np.full(4, 255, np.uint8)
    twin.quantise2(gradient, np.zeros(8, np.float32), 2.0, out)
    assert out.tolist() == [0x32, 0xC2, 0, 0]


def test_max_abs(twin: Any, rng: np.random.Generator) -> None:
    for n in LENGTHS:
        x = rng.standard_normal(n).astype(np.float32)
        assert twin.max_abs(x) == float(np.abs(x).max(initial=0))
        if n:
            x[rng.integers(n)] = -np.inf
            assert twin.max_abs(x) == np.inf
            x[rng.integers(n)] = np.nan
            assert np.isnan(twin.max_abs(x))
    assert twin.max_abs(np.array([0, -1e-45], np.float32)) == pytest.approx(1e-45, rel=0.5)


def test_golden_vectors_recorded_from_mxnet(twin: Any) -> None:
    arrays, facts = np.load(f"{GOLDEN}.npz"), json.loads(Path(f"{GOLDEN}.json").read_text())
    compared = 0
    for ti, threshold in enumerate(facts["thresholds"]):
        for ki, kind in enumerate(facts["kinds"]):
            if kind == "nonfinite" or (kind == "denormal" and twin.NAME == "cupy"):
                continue  # refused before a kernel sees it: see test_encoder
            common = kind in facts["kinds_common"]
            axis = facts["kinds_common" if common else "kinds_dep"].index(kind)
            gradients = arrays["grads_common"][axis] if common else arrays["grads_dep"][ti, axis]
            for si, n in enumerate(facts["sizes"]):
                elements = slice(*facts["offsets"][si : si + 2])
                packed = slice(*facts["packed_offsets"][si : si + 2])
                residuals = [np.zeros(n, np.float32) for _ in range(facts["workers"])]
                for push in range(facts["pushes"]):
                    payloads = []
                    for worker, residual in enumerate(residuals):
                        data, gradient = np.empty(packed_size(n), np.uint8), gradients[worker, push, elements].copy()
                        twin.quantise2(gradient, residual, threshold, data)
                        assert same_bits(data, arrays["packed"][ti, ki, worker, push, packed]), (kind, n, push)
                        payloads.append(data)
                    total = np.zeros(n, np.float32)
                    twin.decode2_add_many(payloads, threshold, total)
                    assert same_bits(total, arrays["out"][ti, ki, push, elements]), (kind, n, push)
                    compared += 1
    assert compared >= 2 * 6 * 7 * 5


def test_kernels_are_chosen_by_the_setting() -> None:
    assert kernels.cpu_kernels("numpy").NAME == "numpy"
    assert kernels.cpu_kernels("auto").NAME == "numba"
    with pytest.raises(ConfigError, match=r"KVSTORE_KERNELS='fast'.*auto, numba, numpy"):
        kernels.cpu_kernels("fast")


def test_an_array_of_another_library_is_named() -> None:
    with pytest.raises(ArrayError, match="NumPy and CuPy arrays, got list"):
        kernels.kernels_for([1.0])


@pytest.mark.parametrize(("setting", "expected"), [("numpy", "numpy False"), ("auto", "numba True")])
def test_the_setting_is_read_from_the_environment(setting: str, expected: str) -> None:
    code = (
        "import sys, numpy; from kvstore.compression.kernels import kernels_for; "
        "name = kernels_for(numpy.zeros(1)).NAME; print(name, 'numba' in sys.modules)"
    )
    assert run(code, KVSTORE_KERNELS=setting) == expected


def test_numpy_serves_where_numba_does_not_import() -> None:
    code = (
        "import sys; sys.modules['numba'] = None; import numpy; "
        "from kvstore.compression.kernels import kernels_for, cpu_kernels; print(kernels_for(numpy.zeros(1)).NAME)"
    )
    assert run(code, KVSTORE_KERNELS="auto") == "numpy"


def test_warm_up_compiles_everything_that_a_push_uses() -> None:
    code = (
        "from kvstore.compression import kernels, kernels_numba as k; kernels.warm_up(); "
        "names = ['_max_bits', '_quantise2', '_decode2', '_decode2_add_many']; "
        "print([len(getattr(k, name).signatures) for name in names])"
    )
    assert run(code, KVSTORE_KERNELS="auto") == "[1, 1, 1, 1]"


def run(code: str, **environment: str) -> str:
    """What `code` prints in a process of its own; the environment keeps only what Python needs."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
