"""Shared by the tests of this folder: the twins of the kernels, the CUDA text run on the host, a printed seed."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import secrets
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
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


@pytest.fixture(scope="session")
def cuda_files_on_host(tmp_path_factory: pytest.TempPathFactory) -> FilesOnHost:
    """Runs any kernel of `cuda_text` by its name on the CPU; its file is compiled when it is first needed."""
    return FilesOnHost(tmp_path_factory.mktemp("cuda_files"), _compiler())


@pytest.fixture(params=["numba", "cuda_on_host", pytest.param("cupy", marks=pytest.mark.gpu)])
def twin_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A family of kernels (`dense`, `dithered`, `sparse`) of every implementation but the reference, for NumPy arrays.

    The launchers for CuPy run over the CUDA text on the host: they are given NumPy arrays and a `launch` of their own.
    """
    kind = request.param
    if kind == "numba":
        return lambda family: importlib.import_module(f"kvstore.compression.{family}_numba")
    if kind == "cupy":
        cupy = cupy_or_skip()
        return lambda family: FamilyOnDevice(cupy, importlib.import_module(f"kvstore.compression.{family}_cupy"))
    files: FilesOnHost = request.getfixturevalue("cuda_files_on_host")
    launcher: Any = ModuleType("kvstore.compression.kernels_cupy")
    launcher._launch, launcher._check = files.launch, files.check
    launcher.empty_bytes = kernels.cpu_kernels("numpy").empty_bytes
    monkeypatch.setitem(sys.modules, launcher.__name__, launcher)

    def load(family: str) -> Any:
        path = cuda_text.FOLDER.with_name(f"{family}_cupy.py")
        spec = importlib.util.spec_from_file_location(f"{family}_on_host", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


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


class FilesOnHost:
    """What `kernels_cupy` offers to its launchers, over NumPy arrays and the CUDA text compiled for the CPU."""

    def __init__(self, folder: Path, compiler: list[str]) -> None:
        self.folder, self.compiler = folder, compiler
        self.libraries: dict[str, ctypes.CDLL] = {}

    def launch(self, name: str, where: Any, threads: int, arguments: tuple[Any, ...]) -> None:
        """A small grid, so that every thread walks in strides."""
        library = self._library(cuda_text.KERNELS[name])
        values = [_argument(one) for one in arguments]
        for block in range(3):
            for thread in range(5):
                library.place_thread(3, 5, block, thread)
                getattr(library, name)(*values)

    def check(self, array: Any, dtype: type, size: int) -> None:
        assert isinstance(array, np.ndarray)
        assert (array.dtype, array.shape) == (dtype, (size,))
        assert array.flags.c_contiguous

    def _library(self, file: str) -> ctypes.CDLL:
        if file not in self.libraries:
            text, built = self.folder / f"{file}.cu", self.folder / f"{file}.so"
            text.write_text(cuda_text.source(file))
            command = [*self.compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{HERE}"]
            command += [f'-DCUDA_TEXT="{text}"', "-o", str(built), str(HERE / "cuda_file_on_host.cpp")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            self.libraries[file] = ctypes.CDLL(str(built))
        return self.libraries[file]


class FamilyOnDevice:
    """A family's CuPy kernels for NumPy arrays: all of them go to the device, and all that can change come back."""

    def __init__(self, cupy: ModuleType, family: ModuleType) -> None:
        self.cupy, self.family = cupy, family

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            moved = [self.cupy.asarray(one) if isinstance(one, np.ndarray) else one for one in arguments]
            result = getattr(self.family, name)(*moved)
            for own, there in zip(arguments, moved, strict=True):
                if isinstance(own, np.ndarray) and own.flags.writeable:
                    own[...] = there.get()
            return result.get() if hasattr(result, "get") else result

        return call


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


_C_TYPES: dict[str, Any] = {"u4": ctypes.c_uint32, "u8": ctypes.c_uint64, "i4": ctypes.c_int32, "i8": ctypes.c_int64}
_C_TYPES |= {"f4": ctypes.c_float, "f8": ctypes.c_double}


def _argument(value: Any) -> Any:
    return _pointer(value) if isinstance(value, np.ndarray) else _C_TYPES[value.dtype.str[1:]](value.item())


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
