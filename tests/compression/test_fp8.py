"""fp8: the codes of other libraries, a scale per block, saturation."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore.compression.codec import Context, Payload
from kvstore.compression.fp8 import Fp8, Fp8Params
from kvstore.compression.registry import parse_params
from kvstore.errors import ParameterError, PayloadError


@pytest.mark.parametrize(
    ("name", "top", "dtype"), [("e4m3", 448, ml_dtypes.float8_e4m3fn), ("e5m2", 57344, ml_dtypes.float8_e5m2)]
)
def test_codes_are_those_of_the_cast_by_block(name: Any, top: float, dtype: Any, rng: np.random.Generator) -> None:
    x = (rng.standard_normal(256) * np.repeat([1, 1e-6, 0, 1e6], 64)).astype(np.float32)
    ctx, codec = Context("w", 256), Fp8(Fp8Params(format=name, block=64))
    payload, _ = codec.encode(x, None, ctx)
    scales, codes = payload.data[:16].view(np.float32), payload.data[16:]
    assert scales.tolist() == (np.abs(x.reshape(4, 64)).max(axis=1) / np.float32(top)).tolist()
    expected: Any = np.divide(x, np.repeat(scales, 64), where=np.repeat(scales, 64) > 0, out=np.zeros_like(x))
    assert codes.tobytes() == expected.astype(dtype).tobytes()
    out = np.zeros(256, np.float32)
    codec.decode_add(payload, out, ctx)
    assert (out == expected.astype(dtype).astype(np.float32) * np.repeat(scales, 64)).all()
    assert payload.meta == {"format": name, "block": 64}


def test_error_is_that_of_the_format(rng: np.random.Generator) -> None:
    x, ctx = rng.standard_normal(100_000).astype(np.float32), Context("w", 100_000)
    payload, _ = Fp8().encode(x, None, ctx)
    out = np.zeros(x.size, np.float32)
    Fp8().decode_add(payload, out, ctx)
    assert ((out - x) ** 2).sum() / (x**2).sum() == pytest.approx(7e-4, rel=0.1)
    assert 8 * payload.nbytes / x.size == pytest.approx(8.125, abs=0.001)


def test_nan_and_foreign_formats_are_refused() -> None:
    ctx, scale = Context("w", 1), np.ones(1, np.float32).tobytes()
    for data, meta in (
        (scale + b"\x7f", {"format": "e4m3", "block": 64}),
        (scale + b"\x7c", {"format": "e5m2", "block": 64}),
        (scale + b"\0", {"format": "e3m4", "block": 64}),
        (scale + b"\0", {"format": "e4m3", "block": 0}),
    ):
        with pytest.raises(PayloadError):
            Fp8().check(Payload(data, meta), ctx)  # type: ignore[arg-type]


def test_parameters_say_what_is_allowed() -> None:
    with pytest.raises(ParameterError, match="one of e4m3, e5m2"):
        parse_params({"type": "fp8", "format": "e3m4"})
    with pytest.raises(ParameterError, match="an integer >= 64 and <= 4096 and a multiple of 64"):
        parse_params({"type": "fp8", "block": "100"})
