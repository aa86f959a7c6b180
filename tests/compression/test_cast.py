"""fp16 and bf16: the casts of other libraries, saturated."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore.compression.codec import Context, Payload
from kvstore.compression.registry import codec_named
from kvstore.errors import PayloadError

TYPES: dict[str, Any] = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def through(name: str, x: Any) -> tuple[Any, Any]:
    codec, ctx = codec_named(name), Context("w", x.size)
    payload, _ = codec.encode(x, None, ctx)
    out = np.zeros(x.size, np.float32)
    codec.decode_add(payload, out, ctx)
    return payload, out


@pytest.mark.parametrize("name", TYPES)
def test_bytes_are_those_of_the_cast(name: str, rng: np.random.Generator) -> None:
    x = (rng.standard_normal(1000) * 10.0 ** rng.uniform(-9, 4, 1000)).astype(np.float32)
    payload, out = through(name, x)
    expected: Any = x.astype(TYPES[name])
    assert payload.data.tobytes() == expected.tobytes()
    assert payload.meta == {}
    assert (out == expected.astype(np.float32)).all()


def test_large_values_stay_finite() -> None:
    assert through("fp16", np.array([65504, 65520, -1e30], np.float32))[1].tolist() == [65504, 65504, -65504]
    largest = np.finfo(np.float32).max
    _, out = through("bf16", np.array([largest, -largest], np.float32))
    assert out.tolist() == [3.3895313892515355e38, -3.3895313892515355e38]


@pytest.mark.parametrize("name", TYPES)
def test_infinity_in_a_payload_is_refused(name: str) -> None:
    data: Any = np.array([1, np.inf], TYPES[name])
    with pytest.raises(PayloadError, match="infinity or NaN"):
        codec_named(name).check(Payload(data.tobytes()), Context("w", 2))
