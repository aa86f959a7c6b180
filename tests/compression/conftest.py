"""Shared by the tests of this folder: the twins of the kernels, the CUDA text run on the host, a printed seed."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import secrets
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.compression import cuda_text, kernels

HERE = Path(__file__).resolve().parent


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers of a seed that is printed with a failure; KVSTORE_TEST_SEED repeats one."""
    seed = int(os.environ.get("KVSTORE_TEST_SEED") or secrets.randbits(32))
    print(f"KVSTORE_TEST_SEED={seed}")  # noqa: T201
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def cuda_on_host(tmp_path_factory: pytest.TempPathFactory) -> HostCuda:
    """The CUDA text, compiled for the CPU. In CI a missing compiler is a failure, elsewhere a skip."""
    library = tmp_path_factory.mktemp("cuda") / "cuda_on_host.so"
    command = [*_compiler(), "-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC"]
    command += [f"-I{HERE}", f"-I{cuda_text.FOLDER}", "-o", str(library), str(HERE / "cuda_on_host.cpp")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return HostCuda(ctypes.CDLL(str(library)))


@pytest.fixture(params=["numpy", "numba", "cuda_on_host", pytest.param("cupy", marks=pytest.mark.gpu)])
def twin(request: pytest.FixtureRequest) -> Any:
    """Every implementation of the kernels, taking and returning NumPy arrays."""
    if request.param == "cuda_on_host":
        return request.getfixturevalue("cuda_on_host")
    if request.param == "cupy":
        return OnDevice(cupy_or_skip())
    return kernels.cpu_kernels(request.param)


def cupy_or_skip() -> ModuleType:
    """CuPy, where a device is there."""
    cupy: ModuleType = pytest.importorskip("cupy", reason="CuPy is not installed")
    if not cupy.is_available():
        pytest.skip("no CUDA device")
    return cupy


def missing_tool(text: str) -> None:
    """Skip by name; in CI fail, so that what must be checked there is checked."""
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)


def _compiler() -> list[str]:
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang") is None:
        missing_tool("no C++ compiler: install g++ or the Python package ziglang")
    return [sys.executable, "-m", "ziglang", "c++"]


class HostCuda:
    """The CUDA kernels through the host shim, with the signatures of `kernels_numpy`."""

    NAME = "cuda_on_host"

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def max_abs(self, x: NDArray[np.float32]) -> float:
        largest = ctypes.c_uint32(0)
        self.library.host_max_abs_bits(_pointer(x), ctypes.c_longlong(x.size), ctypes.byref(largest))
        value: float = struct.unpack("<f", struct.pack("<I", largest.value))[0]
        return value

    def quantise2(self, gradient: Any, residual: Any, threshold: float, out: Any) -> None:
        n, t = ctypes.c_longlong(gradient.size), ctypes.c_float(threshold)
        self.library.host_quantise2(_pointer(gradient), _pointer(residual), n, t, _pointer(out))

    def decode2(self, data: Any, threshold: float, out: Any) -> None:
        n, t = ctypes.c_longlong(out.size), ctypes.c_float(threshold)
        self.library.host_decode2(_pointer(data), n, t, _pointer(out))

    def decode2_add(self, data: Any, threshold: float, out: Any) -> None:
        self.decode2_add_many([data], threshold, out)

    def decode2_add_many(self, data: Sequence[Any], threshold: float, out: Any) -> None:
        addresses = np.array([one.ctypes.data for one in data], np.uint64)
        n, t = ctypes.c_longlong(out.size), ctypes.c_float(threshold)
        self.library.host_decode2_add_many(_pointer(addresses), ctypes.c_int(len(data)), n, t, _pointer(out))


class OnDevice:
    """The CuPy kernels for NumPy arrays: what they change is copied back."""

    NAME = "cupy"

    def __init__(self, cupy: ModuleType) -> None:
        from kvstore.compression import kernels_cupy

        self.cupy, self.kernels = cupy, kernels_cupy

    def max_abs(self, x: Any) -> float:
        return self.kernels.max_abs(self.cupy.asarray(x))

    def quantise2(self, gradient: Any, residual: Any, threshold: float, out: Any) -> None:
        r, o = self.cupy.asarray(residual), self.cupy.asarray(out)
        self.kernels.quantise2(self.cupy.asarray(gradient), r, threshold, o)
        residual[:], out[:] = r.get(), o.get()

    def decode2(self, data: Any, threshold: float, out: Any) -> None:
        o = self.cupy.asarray(out)
        self.kernels.decode2(self.cupy.asarray(data), threshold, o)
        out[:] = o.get()

    def decode2_add(self, data: Any, threshold: float, out: Any) -> None:
        o = self.cupy.asarray(out)
        self.kernels.decode2_add(self.cupy.asarray(data), threshold, o)
        out[:] = o.get()

    def decode2_add_many(self, data: Sequence[Any], threshold: float, out: Any) -> None:
        o = self.cupy.asarray(out)
        self.kernels.decode2_add_many([self.cupy.asarray(one) for one in data], threshold, o)
        out[:] = o.get()


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
