"""Values of sparse codecs on the wire: exact, or cast."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore.compression.codec import Context, Payload
from kvstore.compression.value_types import decode_values, encode_values, value_bytes, value_type
from kvstore.errors import PayloadError

TYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("name", TYPES)
def test_there_and_back_is_a_cast(name: str, rng: np.random.Generator) -> None:
    values = rng.standard_normal(100).astype(np.float32)
    data = encode_values(values, name)
    assert data.nbytes == 100 * value_bytes(name)
    expected: Any = values.astype(TYPES[name])
    assert data.tobytes() == expected.tobytes()
    assert decode_values(data, name).tolist() == expected.astype(np.float32).tolist()


@pytest.mark.parametrize("name", TYPES)
def test_values_that_are_not_finite_are_refused(name: str) -> None:
    bad: Any = np.array([1, np.inf], TYPES[name])
    with pytest.raises(PayloadError, match="infinity or NaN"):
        decode_values(bad.view(np.uint8), name, Context("w", 2))


def test_the_type_must_be_known() -> None:
    assert value_type(Payload(b"", {"value": "float16"}), Context("w", 2)) == "float16"
    for meta in ({}, {"value": "float64"}, {"value": 1}):
        with pytest.raises(PayloadError, match="one of float32, float16, bfloat16"):
            value_type(Payload(b"", meta), Context("w", 2))
