"""Parameters are checked wherever they come from; payloads are checked before they are believed."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest

from kvstore.compression.codec import (
    CompressionType,
    Context,
    Params,
    Payload,
    allowed_values,
    check_parameter,
    payload_bytes,
    payload_number,
)
from kvstore.compression.none import NoneParams
from kvstore.compression.twobit import TwoBitParams
from kvstore.errors import ParameterError, PayloadError

FIELDS = {info.name: info for info in msgspec.structs.fields(Params)}


class Sample(Params, frozen=True, tag="sample"):
    """One field of each kind."""

    flag: bool = False
    name: str = "x"
    rate: Annotated[float, msgspec.Meta(gt=0)] = 1.0


def test_a_type_is_a_scoped_name_and_a_string() -> None:
    assert {"none", "2bit", "powersgd", "ef21"} <= {str(member) for member in CompressionType}
    assert TwoBitParams().type == CompressionType.TWO_BIT
    assert NoneParams().type == "none"


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ("min_elements", "an integer >= 0"),
        ("on_nonfinite", "one of refuse, propagate"),
        ("error_feedback", "one of auto, on, off"),
        ("momentum", "a finite number >= 0 and < 1"),
        ("pull", "one of none"),
    ],
)
def test_allowed_values_are_said_from_the_type(field: str, allowed: str) -> None:
    assert allowed_values(FIELDS[field]) == allowed


def test_allowed_values_of_other_kinds() -> None:
    own = {info.name: info for info in msgspec.structs.fields(Sample)}
    assert allowed_values(own["flag"]) == "true or false"
    assert "str" in allowed_values(own["name"])


@pytest.mark.parametrize("given", [math.nan, math.inf, -math.inf, -1.0, 0.0, "abc", None, [0.5], True])
def test_a_constructor_checks_as_the_text_form_does(given: Any) -> None:
    with pytest.raises(ParameterError, match="threshold") as raised:
        TwoBitParams(threshold=given)
    assert raised.value.parameter == "threshold"
    assert raised.value.given == str(given)
    assert "> 0" in str(raised.value.allowed)


def test_numpy_numbers_are_numbers() -> None:
    assert check_parameter(FIELDS["min_elements"], np.int64(7)) == 7
    assert check_parameter(FIELDS["min_elements"], "7", strict=False) == 7


@pytest.mark.parametrize("given", [math.inf, "inf", "1e999", math.nan])
def test_every_number_must_be_finite(given: Any) -> None:
    rate = {info.name: info for info in msgspec.structs.fields(Sample)}["rate"]
    with pytest.raises(ParameterError, match=r"'rate': got .*, allowed is a finite number > 0"):
        check_parameter(rate, given, strict=False)


@pytest.mark.parametrize("data", [b"abcd", memoryview(b"abcd"), bytearray(b"abcd"), np.frombuffer(b"abcd", np.uint8)])
def test_payload_bytes_of_any_buffer(data: Any) -> None:
    payload = Payload(data)
    assert payload.nbytes == 4
    assert payload_bytes(payload, 4, Context("w", 9)).tolist() == list(b"abcd")


def test_payload_bytes_of_another_length_are_refused() -> None:
    with pytest.raises(
        PayloadError, match=r"key 'w', chunk 2, rank 3: the payload has 4 bytes, 9 elements take 8"
    ) as raised:
        payload_bytes(Payload(b"abcd"), 8, Context("w", 9, chunk=2, rank=3))
    assert (raised.value.key, raised.value.rank) == ("w", 3)


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None, True, 10**400])
def test_payload_number_must_be_finite(value: Any) -> None:
    ctx = Context("w", 9)
    assert payload_number(Payload(b"", {"t": 3}), "t", ctx) == 3.0
    with pytest.raises(PayloadError, match="the payload's t is"):
        payload_number(Payload(b"", {"t": value}), "t", ctx)
    with pytest.raises(PayloadError, match="the payload's t is None"):
        payload_number(Payload(b""), "t", ctx)
