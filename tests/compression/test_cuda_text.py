"""The CUDA text compiles for every kind of device this project names, to exact arithmetic, without a device."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.compression import cuda_text

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
FILES = sorted(path.stem for path in cuda_text.FOLDER.glob("*.cu"))


class Nvrtc:
    """The few calls of NVIDIA's run-time compiler that a test needs."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def architectures(self) -> list[int]:
        count = ctypes.c_int()
        assert self.library.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
        numbers = (ctypes.c_int * count.value)()
        assert self.library.nvrtcGetSupportedArchs(numbers) == 0
        return list(numbers)

    def compile(self, name: str, target: str, *, what: str) -> bytes:
        """`what` is PTX or CUBIN; a failure shows the compiler's log."""
        program = ctypes.c_void_p()
        text = cuda_text.source(name).encode()
        assert self.library.nvrtcCreateProgram(ctypes.byref(program), text, f"{name}.cu".encode(), 0, None, None) == 0
        options = [option.encode() for option in (*cuda_text.OPTIONS, f"--gpu-architecture={target}")]
        status = self.library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        assert status == 0, self._get(program, "ProgramLog").decode()
        result = self._get(program, what)
        assert self.library.nvrtcDestroyProgram(ctypes.byref(program)) == 0
        return result

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        assert getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(self.library, f"nvrtcGet{what}")(program, buffer) == 0
        return buffer.raw


def libraries() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(folder).rglob("libnvrtc.so*"))


@pytest.fixture(scope="session")
def nvrtc() -> Nvrtc:
    for path in libraries():
        return Nvrtc(ctypes.CDLL(str(path)))
    if os.environ.get("CI"):
        pytest.fail("NVRTC is not installed: install nvidia-cuda-nvrtc")
    pytest.skip("NVRTC is not installed: install nvidia-cuda-nvrtc")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_to_machine_code(nvrtc: Nvrtc, name: str, architecture: int) -> None:
    if architecture not in nvrtc.architectures():
        pytest.skip(f"this NVRTC does not know sm_{architecture}")
    assert nvrtc.compile(name, f"sm_{architecture}", what="CUBIN").startswith(b"\x7fELF")


@pytest.mark.parametrize("name", FILES)
def test_arithmetic_is_exact(nvrtc: Nvrtc, name: str) -> None:
    ptx = nvrtc.compile(name, "compute_80", what="PTX").decode()
    assert re.findall(r"\b(?:fma\S*|\S+\.ftz\S*|\S+\.approx\S*)", ptx) == []
    if name == "twobit":
        assert "add" in ptx
        assert "f32" in ptx


@pytest.mark.parametrize("name", FILES)
def test_text_needs_no_header(name: str) -> None:
    assert "#include" not in cuda_text.source(name)


def test_every_kernel_is_listed_with_its_file() -> None:
    found = {
        kernel: name
        for name in FILES
        for kernel in re.findall(r'extern "C" __global__ void (\w+)\(', cuda_text.source(name))
    }
    assert found == cuda_text.KERNELS
