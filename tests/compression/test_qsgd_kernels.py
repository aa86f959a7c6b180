"""The QSGD operator: three twins, one result, bit for bit."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvstore.compression import qsgd_numba, qsgd_numpy


class OnHost:
    """`cuda/qsgd.cu` through the host shim."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def quantise(self, x: Any, d: int, s: int, l2: bool, key: int, chunk: int) -> Any:
        norms, levels = np.zeros(-(-x.size // d), np.float32), np.zeros(x.size, np.int16)
        n, width = ctypes.c_longlong(x.size), ctypes.c_longlong(d)
        self.library.host_qsgd_norms(at(x), n, width, ctypes.c_int(l2), at(norms))
        numbers = (ctypes.c_uint64(key), ctypes.c_uint32(chunk))
        self.library.host_qsgd_levels(at(x), n, width, ctypes.c_int(s), at(norms), *numbers, at(levels))
        return norms, levels[np.repeat(norms != 0, d)[: x.size]]

    def dequantise(self, levels: Any, norms: Any, d: int, s: int, out: Any, add: bool) -> None:
        whole = np.zeros(out.size, np.int16)
        whole[np.repeat(norms != 0, d)[: out.size]] = levels
        sizes = (ctypes.c_longlong(out.size), ctypes.c_longlong(d), ctypes.c_int(s), ctypes.c_int(add))
        self.library.host_qsgd_dequantise(at(whole), at(norms), *sizes, at(out))


def at(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.fixture(params=["numba", "cuda_on_host"])
def twin(request: pytest.FixtureRequest) -> Any:
    if request.param == "numba":
        return qsgd_numba
    return OnHost(request.getfixturevalue("cuda_on_host").library)


def gradients(n: int, rng: np.random.Generator) -> list[Any]:
    x = rng.standard_normal(n).astype(np.float32)
    with_zeros = x.copy()
    with_zeros[: n // 2] = -0.0
    return [x, with_zeros, x * np.float32(1e-41), x * np.float32(1e37), np.zeros(n, np.float32)]


@pytest.mark.parametrize("l2", [False, True])
@pytest.mark.parametrize("s", [1, 7, 127, 32767])
@pytest.mark.parametrize(("n", "d"), [(1, 1), (9, 7), (65, 64), (1000, 3), (2051, 512), (700, 1024)])
def test_twins_agree(twin: Any, n: int, d: int, s: int, l2: bool, rng: np.random.Generator) -> None:
    for x in gradients(n, rng):
        norms, levels = qsgd_numpy.quantise(x, d, s, l2, 0x123456789ABCDEF0, 5)
        own_norms, own_levels = twin.quantise(x, d, s, l2, 0x123456789ABCDEF0, 5)
        assert own_norms.tobytes() == norms.tobytes()
        assert own_levels.tobytes() == levels.tobytes()
        for add in (False, True):
            expected, out = np.full(n, 0.5, np.float32), np.full(n, 0.5, np.float32)
            qsgd_numpy.dequantise(levels, norms, d, s, expected, add)
            twin.dequantise(levels, norms, d, s, out, add)
            assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("s", [7, 127, 5, 1])
@pytest.mark.parametrize(("n", "d"), [(1, 2), (9, 4), (65, 64), (1001, 512), (700, 1024), (30, 3)])
def test_fixed_width_in_one_pass_is_the_same(n: int, d: int, s: int, rng: np.random.Generator) -> None:
    for x in gradients(n, rng):
        expected = qsgd_numpy.quantise_fixed(x, d, s, False, 9, 1)
        own = qsgd_numba.quantise_fixed(x, d, s, False, 9, 1)
        assert [np.asarray(one).tobytes() for one in own] == [np.asarray(one).tobytes() for one in expected]
        if s in (7, 127) and d % 2 == 0:
            norms, levels = qsgd_numpy.quantise(x, d, s, False, 9, 1)
            for add in (False, True):
                whole = np.full(n, 0.5, np.float32)
                qsgd_numpy.dequantise(levels, norms, d, s, whole, add)
                for module in (qsgd_numpy, qsgd_numba):
                    out = np.full(n, 0.5, np.float32)
                    module.decode_fixed(own[1], norms, d, 1 + s.bit_length(), out, add)
                    assert out.tobytes() == whole.tobytes()


@pytest.mark.gpu
def test_device_agrees(rng: np.random.Generator) -> None:
    cupy: ModuleType = pytest.importorskip("cupy")
    if not cupy.is_available():
        pytest.skip("no CUDA device")
    from kvstore.compression import qsgd_cupy

    for x in gradients(2051, rng):
        norms, levels = qsgd_numpy.quantise(x, 512, 7, True, 3, 1)
        own_norms, own_levels = qsgd_cupy.quantise(cupy.asarray(x), 512, 7, True, 3, 1)
        assert own_norms.tobytes() == norms.tobytes()
        assert own_levels.tobytes() == levels.tobytes()
        expected, out = np.ones(2051, np.float32), cupy.ones(2051, np.float32)
        qsgd_numpy.dequantise(levels, norms, 512, 7, expected, True)
        qsgd_cupy.dequantise(levels, norms, 512, 7, out, True)
        assert out.get().tobytes() == expected.tobytes()
