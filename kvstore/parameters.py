"""Turns a user's names and values (numbers or their text) into a frozen msgspec struct, or says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from kvstore.errors import ParameterError, nearest_first

S = TypeVar("S", bound=msgspec.Struct)

FLOAT32_MAX = 3.4028234663852886e38
"""Larger parameters would be infinite in the arithmetic of float32 values."""


def convert_parameters(struct: type[S], given: Mapping[str, object], owner: str) -> S:
    """Build `struct` from `given`; values may be text, as in '0.1'. `owner` says whose parameters they are.

    Raises:
        ParameterError: unknown or missing name, wrong type, out of range, nan or infinity.
    """
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in fields:
            raise _unknown(name, fields, owner)
        values[name] = convert_value(value, fields[name].type, name, owner)
    for name, field in fields.items():
        if field.required and name not in values:
            raise ParameterError(f"{owner} needs the parameter {name!r}", parameter=name)
    return struct(**values)


def convert_value(value: object, annotation: Any, name: str, owner: str) -> Any:
    """Convert one value to the annotated type; text of numbers and booleans is understood."""
    plain = value.item() if hasattr(value, "item") else value  # NumPy scalars
    try:
        converted = msgspec.convert(plain, annotation, strict=False)
    except msgspec.ValidationError as error:
        raise _wrong(name, value, str(error), owner) from None
    if isinstance(converted, float) and not (math.isfinite(converted) and abs(converted) <= FLOAT32_MAX):
        raise _wrong(name, value, "a finite number within the range of float32", owner)
    return converted


def _wrong(name: str, value: object, allowed: str, owner: str) -> ParameterError:
    text = f"{owner}: parameter {name!r} is {value!r}, allowed: {allowed}"
    return ParameterError(text, parameter=name, given=repr(value), allowed=allowed)


def _unknown(name: str, known: Iterable[str], owner: str) -> ParameterError:
    names = ", ".join(nearest_first(name, known)) or "none"
    text = f"{owner} has no parameter {name!r}; it takes {names}"
    return ParameterError(text, parameter=name, given=name, allowed=names)
