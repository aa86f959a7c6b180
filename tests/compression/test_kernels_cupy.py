"""The launcher: on a device, and as far as it goes without one (its text is checked in test_cuda_text)."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvstore.compression import cuda_text, kernels
from kvstore.compression.codec import Context
from kvstore.compression.encoder import KeyEncoder
from kvstore.compression.registry import codec_named, parse_params
from kvstore.errors import ArrayError, NonFiniteError

LAUNCHER = Path(kernels.__file__).with_name("kernels_cupy.py")


@pytest.fixture
def cupy() -> ModuleType:
    module: ModuleType = pytest.importorskip("cupy", reason="CuPy is not installed")
    if not module.is_available():
        pytest.skip("no CUDA device")
    return module


def test_offers_what_the_protocol_of_kernels_asks_for() -> None:
    defined = {node.name for node in ast.parse(LAUNCHER.read_text()).body if isinstance(node, ast.FunctionDef)}
    asked = {name for name in vars(kernels.Kernels) if not name.startswith("_")} - {"NAME"}
    assert asked <= defined


def test_launches_every_kernel_by_its_name() -> None:
    texts = [path.read_text() for path in LAUNCHER.parent.glob("*_cupy.py")]
    calls = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    launched = {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id in ("_launch", "launch")
        and isinstance(call.args[0], ast.Constant)
    }
    assert launched == set(cuda_text.KERNELS)


@pytest.mark.gpu
def test_a_key_on_the_device_is_encoded_there_and_decoded_anywhere(cupy: ModuleType, rng: np.random.Generator) -> None:
    n = 300_000
    on_host, on_device = (KeyEncoder("w", n, np.dtype(np.float32)) for _ in range(2))
    params, codec = parse_params({"type": "2bit"}), codec_named("2bit")
    for round in (1, 2, 3):
        gradient = rng.standard_normal(n).astype(np.float32)
        host = list(on_host.encode(on_host.prepare(gradient, params, round)))
        device = list(on_device.encode(on_device.prepare(cupy.asarray(gradient), params, round)))
        for ours, theirs in zip(host, device, strict=True):
            assert isinstance(theirs.payload.data, np.ndarray)
            assert ours.payload.data.tobytes() == theirs.payload.data.tobytes()
            out, ctx = cupy.zeros(ours.n, np.float32), Context("w", ours.n)
            expected = np.zeros(ours.n, np.float32)
            codec.decode_add(theirs.payload, out, ctx)
            codec.decode_add(ours.payload, expected, ctx)
            assert out.get().tobytes() == expected.tobytes()
    assert on_host.state()["residual"].tobytes() == on_device.state()["residual"].tobytes()


@pytest.mark.gpu
def test_refuses_on_the_device_too(cupy: ModuleType) -> None:
    encoder = KeyEncoder("w", 100, np.dtype(np.float32))
    gradient = cupy.ones(100, np.float32)
    gradient[7] = np.nan
    with pytest.raises(NonFiniteError):
        encoder.prepare(gradient, parse_params({"type": "2bit"}))
    from kvstore.compression import kernels_cupy

    with pytest.raises(ArrayError):
        kernels_cupy.decode2(cupy.zeros(4, np.uint8), 0.5, cupy.zeros(100, np.float32))


@pytest.mark.gpu
def test_warm_up(cupy: ModuleType) -> None:
    from kvstore.compression import kernels_cupy

    kernels_cupy.warm_up()
