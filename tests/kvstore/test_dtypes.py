"""Element types: names, accumulators, bytes."""

import ml_dtypes
import numpy as np
import pytest

from kvstore.dtypes import DTYPES, accumulator, as_bytes_view, from_bytes, is_float, named_dtype
from kvstore.errors import ArrayError, PayloadError


def test_every_name_is_that_of_its_type() -> None:
    assert {name: dtype.name for name, dtype in DTYPES.items()} == {name: name for name in DTYPES}
    assert len(DTYPES) == 13


@pytest.mark.parametrize("name", ["complex64", "object", "str32", "datetime64[ns]", "float128", "float8_e4m3fn"])
def test_other_types_are_refused_by_key(name: str) -> None:
    with pytest.raises(ArrayError, match=r"'emb'.*bfloat16") as caught:
        named_dtype(name, "emb")
    assert caught.value.key == "emb"


def test_half_precision_accumulates_in_float32_and_everything_else_in_itself() -> None:
    for name, dtype in DTYPES.items():
        assert accumulator(dtype).name == ("float32" if name in ("float16", "bfloat16") else name)


def test_float_types_are_those_that_can_be_compressed() -> None:
    assert {name for name, dtype in DTYPES.items() if is_float(dtype)} == {"float16", "bfloat16", "float32", "float64"}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_bytes_round_trip_without_a_copy(name: str, n: int) -> None:
    flat = np.arange(n).astype(DTYPES[name])
    frame = as_bytes_view(flat)
    assert (frame.nbytes, frame.format, frame.ndim) == (flat.nbytes, "B", 1)
    again = from_bytes(frame, DTYPES[name])
    assert again.dtype == flat.dtype
    assert again.tobytes() == flat.tobytes()
    if n:
        assert np.shares_memory(again, flat)


def test_bytes_are_little_endian() -> None:
    assert bytes(as_bytes_view(np.array([1, 258], np.int16))) == b"\x01\x00\x02\x01"
    assert bytes(as_bytes_view(np.array([1.0], ml_dtypes.bfloat16))) == b"\x80\x3f"


def test_half_an_element_is_refused() -> None:
    with pytest.raises(PayloadError, match=r"6 bytes.*float32"):
        from_bytes(b"123456", DTYPES["float32"])
