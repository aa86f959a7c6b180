"""Names of codecs to the codecs themselves, and text parameters to typed ones.

Built-ins are named as 'module:Class' and imported on first use. A third party registers its codec with an
entry point of the group `gradkv.codecs`: name = 'package.module:Class'.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, cast

import msgspec
import numpy as np

from kvstore.compression.codec import (
    Codec,
    CompressionType,
    Feedback,
    Params,
    SizedByShape,
    allowed_values,
    check_parameter,
    parameter_error,
    satisfies,
)
from kvstore.errors import ConfigError, ParameterError, UnknownNameError, nearest_first

ENTRY_POINTS = "gradkv.codecs"

_CODECS: dict[str, str | type[Any]] = {
    CompressionType.NONE.value: "kvstore.compression.none:NoneCodec",
    CompressionType.TWO_BIT.value: "kvstore.compression.twobit:TwoBit",
    CompressionType.DGC.value: "kvstore.compression.dgc:Dgc",
    CompressionType.DRIVE.value: "kvstore.compression.eden:Drive",
    CompressionType.EDEN.value: "kvstore.compression.eden:Eden",
    CompressionType.EF21.value: "kvstore.compression.ef21:Ef21",
    CompressionType.POWERSGD.value: "kvstore.compression.powersgd:PowerSgd",
}
CODECS: Mapping[str, str | type[Any]] = MappingProxyType(_CODECS)
"""What is registered, without entry points; a view, not to be changed."""

_SAMPLE = 1 << 20  # elements over which bits per element are counted


def register(name: str, codec: str | type[Any]) -> None:
    """Add a codec: its class, or 'module:Class' to be imported on first use.

    Raises:
        ConfigError: the name is taken.
    """
    if name in _CODECS:
        raise ConfigError(f"the codec {name!r} is registered already, as {_CODECS[name]!r}; choose another name")
    _CODECS[name] = codec


def known_names() -> list[str]:
    """Every name that `codec_class` accepts, entry points included."""
    return sorted({*_CODECS, *_entry_points()})


def codec_class(name: str) -> type[Any]:
    """The class registered under `name`.

    Raises:
        UnknownNameError: nobody registered it; the text lists the known names, nearest first.
    """
    target = _CODECS.get(name) or _entry_points().get(name)
    if target is None:
        known = ", ".join(nearest_first(name, known_names()))
        text = (
            f"compression type {name!r} is not registered; known are {known}. Codecs of other "
            f"packages appear once the package is installed (entry point group {ENTRY_POINTS!r})"
        )
        raise UnknownNameError(text, name=name)
    return _import(target) if isinstance(target, str) else target


def make_codec(params: Params) -> Codec:
    """The codec of these parameters.

    Raises:
        ParameterError: the parameters contradict each other.
    """
    codec = cast(Codec, codec_class(params.type)(params))
    feedback_enabled(codec)
    return codec


@cache
def codec_named(name: str) -> Codec:
    """The codec with default parameters: it decodes payloads of this name, whatever they were encoded with.

    Raises:
        UnknownNameError: nobody registered it.
    """
    return cast(Codec, codec_class(name)())


def feedback_enabled(codec: Codec) -> bool:
    """Whether error feedback is wrapped around this codec.

    Raises:
        ParameterError: it is asked for although it diverges (unbiased codecs of high variance).
    """
    match codec.params.error_feedback:
        case Feedback.AUTO:
            return codec.feedback
        case Feedback.OFF:
            return False
        case Feedback.ON:
            if not codec.contraction and not getattr(codec.params, "scaled", False):
                allowed = f"auto or off with {codec.params.type}: its error can exceed its input, so feedback diverges"
                raise parameter_error("error_feedback", "on", allowed)
            return True


def parse_params(mapping: Mapping[str, object], *, top_level: bool = True) -> Params:
    """Typed parameters from names to texts or values, such as {'type': '2bit', 'threshold': '0.5'}.

    Args:
        mapping: `type` names the codec, the rest are its parameters.
        top_level: refuse the type `none`, which is for single keys.

    Raises:
        ParameterError: a parameter is unknown, missing, of a wrong type or out of range.
        UnknownNameError: no codec has this type.
    """
    if not isinstance(mapping, Mapping):
        allowed = "a mapping such as {'type': '2bit', 'threshold': 0.5}"
        raise parameter_error("compression", mapping, allowed)
    fields = dict(mapping)
    name = _type_name(fields.pop("type", None))
    if top_level and name == CompressionType.NONE:
        allowed = "a codec; to send everything raw call clear_gradient_compression(), 'none' is for single keys"
        raise parameter_error("type", name, allowed)
    params_type: type[Params] = codec_class(name).params_type
    known = {info.name: info for info in msgspec.structs.fields(params_type)}
    values = {
        field: check_parameter(_field(name, field, known), given, strict=False) for field, given in fields.items()
    }
    missing = [info.name for info in known.values() if info.required and info.name not in values]
    if missing:
        raise parameter_error(missing[0], None, f"{allowed_values(known[missing[0]])}; {name} needs it")
    params = params_type(**values)
    make_codec(params)
    return params


def params_to_strings(params: Params) -> dict[str, str]:
    """The inverse of `parse_params`, for the wire: every parameter as text, without loss."""
    texts = {"type": params.type}
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if value is not None:
            texts[name] = _text(value)
    return texts


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter of a codec, as its type says."""

    name: str
    default: str
    allowed: str


@dataclass(frozen=True, slots=True)
class CodecRow:
    """What there is to know of a codec before using it; nothing of it is written by hand."""

    name: str
    summary: str
    parameters: tuple[ParameterRow, ...]
    bits_per_element: float
    unit: str
    unbiased: bool
    contraction: bool
    linear: bool
    accumulates: bool
    feedback: bool


def describe(names: Iterable[str] | None = None) -> list[CodecRow]:
    """One row per registered codec, generated from the types. Bits are the most that float32 takes."""
    return [_row(name) for name in (known_names() if names is None else names)]


def _row(name: str) -> CodecRow:
    cls = codec_class(name)
    codec = cast(Codec, cls())
    parameters = tuple(
        ParameterRow(info.name, "" if info.required else _text(info.default), allowed_values(info))
        for info in msgspec.structs.fields(cls.params_type)
    )
    return CodecRow(
        name=name,
        summary=(cls.__doc__ or "").strip().splitlines()[0],
        parameters=parameters,
        bits_per_element=8 * _sample_bytes(codec) / _SAMPLE,
        unit=codec.unit,
        unbiased=codec.unbiased,
        contraction=codec.contraction,
        linear=codec.linear,
        accumulates=codec.accumulates,
        feedback=codec.feedback,
    )


def _sample_bytes(codec: Codec) -> int:
    """Bytes of a million float32, as a square matrix where the shape counts."""
    if satisfies(codec, SizedByShape):
        side = math.isqrt(_SAMPLE)
        size = cast(SizedByShape, codec).encoded_bytes((side, side))
        return 4 * _SAMPLE if size is None else size
    return codec.max_bytes(_SAMPLE, np.dtype(np.float32))


def _type_name(given: object) -> str:
    if given is None:
        text = "the compression parameter 'type' is missing: it names the codec, one of " + ", ".join(known_names())
        raise ParameterError(text, parameter="type", given=None, allowed=", ".join(known_names()))
    if not isinstance(given, str):
        raise parameter_error("type", given, "one of " + ", ".join(known_names()))
    return given.value if isinstance(given, CompressionType) else given


def _field(codec: str, name: str, known: Mapping[str, msgspec.structs.FieldInfo]) -> msgspec.structs.FieldInfo:
    if name in known:
        return known[name]
    near = nearest_first(str(name), known)
    text = f"{codec} has no compression parameter {name!r}; did you mean {near[0]!r}? Known are {', '.join(near)}"
    raise ParameterError(text, parameter=str(name), given=str(name), allowed=", ".join(near))


def _text(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


@cache
def _entry_points() -> Mapping[str, str]:
    from importlib.metadata import entry_points  # here, since it takes as long to import as all of ours

    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}


@cache
def _import(target: str) -> type[Any]:
    module, _, name = target.partition(":")
    cls: type[Any] = getattr(importlib.import_module(module), name)
    return cls
