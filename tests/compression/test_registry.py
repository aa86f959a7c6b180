"""Names, parameters as text, and what is said about mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from kvstore.compression import registry
from kvstore.compression.codec import CompressionType, Feedback, OnNonFinite, Params
from kvstore.compression.none import NoneCodec, NoneParams
from kvstore.compression.registry import (
    codec_class,
    codec_named,
    describe,
    feedback_enabled,
    known_names,
    make_codec,
    params_to_strings,
    parse_params,
    register,
)
from kvstore.compression.twobit import TwoBit, TwoBitParams
from kvstore.errors import ConfigError, ParameterError, UnknownNameError


class NoisyParams(Params, frozen=True, tag="noisy"):
    """Parameters of a codec that is unbiased, with a required one."""

    levels: int
    scaled: bool = False


class Noisy(NoneCodec):
    """Stands for a codec of a third party."""

    params_type: ClassVar[type[Params]] = NoisyParams
    contraction: ClassVar[bool] = False

    def __init__(self, params: Any = None) -> None:
        self.params = params or NoisyParams(levels=1)


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(registry._CODECS, "noisy", Noisy)
    yield
    codec_named.cache_clear()


def test_every_built_in_type_is_registered_and_nothing_else() -> None:
    assert set(registry.CODECS) == {member.value for member in CompressionType}
    for member in CompressionType:
        assert codec_class(member).params_type().type == member


def test_the_public_view_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        registry.CODECS["2bit"] = Noisy  # type: ignore[index]


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'2bit' is registered already"):
        register("2bit", Noisy)
    assert codec_class("2bit") is TwoBit


def test_a_registered_codec_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_CODECS", dict(registry._CODECS))
    register("noisy", Noisy)
    assert parse_params({"type": "noisy", "levels": "3"}) == NoisyParams(levels=3)


def test_an_entry_point_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("theirs", "kvstore.compression.twobit:TwoBit", registry.ENTRY_POINTS)]
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: points if group == registry.ENTRY_POINTS else []
    )
    registry._entry_points.cache_clear()
    try:
        assert codec_class("theirs") is TwoBit
        assert "theirs" in known_names()
    finally:
        registry._entry_points.cache_clear()


def test_unknown_names_list_the_known_ones_nearest_first() -> None:
    with pytest.raises(UnknownNameError, match=r"'2bits' is not registered; known are 2bit, .*none") as raised:
        codec_class("2bits")
    assert raised.value.name == "2bits"


@pytest.mark.parametrize("threshold", ["0.5", 0.5, "5e-1", np.float32(0.5), np.float64(0.5)])
def test_text_and_values_mean_the_same(threshold: object) -> None:
    assert parse_params({"type": "2bit", "threshold": threshold}) == TwoBitParams(threshold=0.5)


def test_defaults() -> None:
    params = parse_params({"type": "2bit"})
    assert params == TwoBitParams(threshold=0.5)
    assert (params.min_elements, params.momentum, params.warmup_rounds, params.seed, params.pull) == (
        0,
        0,
        0,
        0,
        "none",
    )
    assert params.on_nonfinite is OnNonFinite.REFUSE
    assert params.error_feedback is Feedback.AUTO


def test_the_enum_is_accepted_as_type() -> None:
    assert parse_params({"type": CompressionType.TWO_BIT}).type == "2bit"


@pytest.mark.parametrize(
    "params",
    [
        TwoBitParams(threshold=0.1),
        TwoBitParams(threshold=1 / 3, min_elements=1000, on_nonfinite=OnNonFinite.PROPAGATE),
        TwoBitParams(threshold=1.2e-38, error_feedback=Feedback.OFF, warmup_rounds=3, seed=2**63 - 1),
        NoneParams(),
    ],
)
def test_to_strings_and_back_loses_nothing(params: Params) -> None:
    texts = params_to_strings(params)
    assert all(isinstance(text, str) for text in texts.values())
    assert parse_params(texts, top_level=False) == params


@pytest.mark.parametrize(
    ("mapping", "parameter", "text"),
    [
        ({}, "type", "'type' is missing"),
        ({"threshold": 1}, "type", "one of .*2bit.*none"),
        ({"type": 2}, "type", "got 2"),
        ({"type": "none"}, "type", r"clear_gradient_compression\(\)"),
        ({"type": "2bit", "threshold": 0}, "threshold", "> 0"),
        ({"type": "2bit", "threshold": "-1"}, "threshold", "got '-1'"),
        ({"type": "2bit", "threshold": "abc"}, "threshold", "a finite number > 0"),
        ({"type": "2bit", "threshold": "nan"}, "threshold", "finite"),
        ({"type": "2bit", "threshold": "inf"}, "threshold", "finite"),
        ({"type": "2bit", "threshold": 1e-60}, "threshold", "within float32"),
        ({"type": "2bit", "threshold": 1e39}, "threshold", "within float32"),
        ({"type": "2bit", "treshold": 1}, "treshold", "did you mean 'threshold'"),
        ({"type": "2bit", 3: 1}, "3", "no compression parameter 3"),
        ({"type": "2bit", "min_elements": "1.5"}, "min_elements", "an integer >= 0"),
        ({"type": "2bit", "min_elements": -1}, "min_elements", ">= 0"),
        ({"type": "2bit", "on_nonfinite": "ignore"}, "on_nonfinite", "one of refuse, propagate"),
        ({"type": "2bit", "pull": "2bit"}, "pull", "one of none"),
        ({"type": "2bit", "momentum": "1"}, "momentum", "< 1"),
        ({"type": "2bit", "seed": 2**64}, "seed", "an integer"),
        ("2bit", "compression", "a mapping such as"),
    ],
)
def test_mistakes_name_the_parameter(mapping: Any, parameter: str, text: str) -> None:
    with pytest.raises(ParameterError, match=text) as raised:
        parse_params(mapping)
    assert raised.value.parameter == parameter


def test_raw_is_for_single_keys() -> None:
    assert parse_params({"type": "none"}, top_level=False) == NoneParams()


def test_a_missing_required_parameter_is_named(noisy: None) -> None:
    with pytest.raises(ParameterError, match=r"levels.*noisy needs it"):
        parse_params({"type": "noisy"})


def test_feedback_follows_the_codec_the_user_and_reason(noisy: None) -> None:
    assert feedback_enabled(make_codec(TwoBitParams()))
    assert not feedback_enabled(make_codec(TwoBitParams(error_feedback=Feedback.OFF)))
    assert not feedback_enabled(make_codec(NoneParams()))
    with pytest.raises(ParameterError, match=r"error_feedback.*noisy.*diverges"):
        parse_params({"type": "noisy", "levels": 1, "error_feedback": "on"})
    assert parse_params({"type": "noisy", "levels": 1, "error_feedback": "on", "scaled": "true"})


def test_decoders_are_shared() -> None:
    assert codec_named("2bit") is codec_named("2bit")
    with pytest.raises(UnknownNameError):
        codec_named("3bit")


def test_description_comes_from_the_types() -> None:
    rows = {row.name: row for row in describe()}
    assert sorted(rows) == known_names()
    two_bit = rows["2bit"]
    assert (two_bit.bits_per_element, two_bit.unit, two_bit.unbiased, two_bit.feedback) == (2.0, "chunk", False, True)
    assert rows["none"].bits_per_element == 32.0
    assert [row.name for row in two_bit.parameters] == [info.name for info in msgspec.structs.fields(TwoBitParams)]
    threshold = next(row for row in two_bit.parameters if row.name == "threshold")
    assert (threshold.default, threshold.allowed) == ("0.5", "a finite number > 0")
    assert two_bit.summary.startswith("MXNet's 2-bit")
