"""Which key gets which parameters."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvstore.compression.policy import RAW, CompressionPolicy
from kvstore.compression.twobit import TwoBitParams
from kvstore.errors import ParameterError, UnknownNameError

F4 = np.dtype(np.float32)


def test_nothing_set_means_raw() -> None:
    assert CompressionPolicy().params_for("w", 10**6, F4) is RAW


def test_one_setting_for_all_keys() -> None:
    policy = CompressionPolicy.parse({"type": "2bit", "threshold": "0.25"})
    for key in ("w", "", "embed.weight", 7, -1):
        assert policy.params_for(key, 1, F4) == TwoBitParams(threshold=0.25)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_every_float_is_compressed(dtype: type) -> None:
    assert CompressionPolicy.parse({"type": "2bit"}).params_for("w", 9, np.dtype(dtype)) == TwoBitParams()


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8, np.bool_, np.complex64])
def test_integers_are_raw_under_one_setting_and_an_error_by_name(dtype: type) -> None:
    own = CompressionPolicy.parse({"type": "2bit"}, {"counts*": {"type": "2bit"}, "raw*": {"type": "none"}})
    assert own.params_for("w", 9, np.dtype(dtype)) is RAW
    assert own.params_for("raw1", 9, np.dtype(dtype)) == RAW
    with pytest.raises(ParameterError, match=rf"'counts1'.*'counts\*'.*{np.dtype(dtype).name}") as raised:
        own.params_for("counts1", 9, np.dtype(dtype))
    assert raised.value.key == "counts1"


def test_first_pattern_that_matches_wins() -> None:
    policy = CompressionPolicy.parse(
        {"type": "2bit"},
        {
            "*.bias": {"type": "none"},
            "embed.*": {"type": "2bit", "threshold": 2},
            "*": {"type": "2bit", "threshold": 3},
        },
    )
    assert policy.params_for("embed.bias", 9, F4) == RAW
    assert policy.params_for("embed.weight", 9, F4) == TwoBitParams(threshold=2)
    assert policy.params_for("Embed.weight", 9, F4) == TwoBitParams(threshold=3)


def test_integer_keys_match_as_text() -> None:
    policy = CompressionPolicy.parse({"type": "2bit"}, {"1?": {"type": "none"}})
    assert policy.params_for(12, 9, F4) == RAW
    assert policy.params_for(2, 9, F4) == TwoBitParams()


def test_small_keys_are_raw() -> None:
    policy = CompressionPolicy.parse({"type": "2bit", "min_elements": 1000}, {"all": {"type": "2bit"}})
    assert policy.params_for("w", 999, F4) is RAW
    assert policy.params_for("w", 1000, F4).type == "2bit"
    assert policy.params_for("all", 1, F4).type == "2bit"


def test_exceptions_without_a_general_setting() -> None:
    policy = CompressionPolicy.parse(None, {"big": {"type": "2bit"}})
    assert policy.params_for("small", 9, F4) is RAW
    assert policy.params_for("big", 9, F4).type == "2bit"


def test_policies_travel_and_compare() -> None:
    policy = CompressionPolicy.parse(
        {"type": "2bit", "threshold": 0.1}, {"b*": {"type": "none"}, "a": {"type": "2bit"}}
    )
    assert CompressionPolicy.from_wire(policy.to_wire()) == policy
    assert CompressionPolicy.from_wire(CompressionPolicy().to_wire()) == CompressionPolicy()
    assert policy == CompressionPolicy.parse(
        {"type": "2bit", "threshold": "0.1"}, {"b*": {"type": "none"}, "a": {"type": "2bit"}}
    )
    assert policy != CompressionPolicy.parse({"type": "2bit", "threshold": 0.1})


def test_mistakes() -> None:
    with pytest.raises(UnknownNameError):
        CompressionPolicy.parse({"type": "2bit"}, {"w": {"type": "3bit"}})
    with pytest.raises(ParameterError, match="per_key"):
        CompressionPolicy.parse({"type": "2bit"}, {"": {"type": "none"}})
    with pytest.raises(ParameterError, match="clear_gradient_compression"):
        CompressionPolicy.parse({"type": "none"})
