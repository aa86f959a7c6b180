"""Which parameters compress which key: one setting for all, exceptions by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from kvstore.compression.codec import CompressionType, Key, Params, parameter_error
from kvstore.compression.none import NoneParams
from kvstore.compression.registry import codec_class, params_to_strings, parse_params
from kvstore.errors import ConfigError

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Dtypes that codecs take; all others travel raw."""

RAW = NoneParams()
_ANY_SIZE = 2**62


@dataclass(frozen=True, slots=True)
class CompressionPolicy:
    """One setting for all keys (`default`, raw if None) and patterns of which the first that matches wins.

    Patterns are those of a shell (`*.bias`, `embed.*`), case counts; an integer key is matched as its decimal
    text. Two policies that mean the same compare equal.
    """

    default: Params | None = None
    per_key: tuple[tuple[str, Params], ...] = ()

    @classmethod
    def parse(
        cls, params: Mapping[str, object] | None, per_key: Mapping[str, Mapping[str, object]] | None = None
    ) -> CompressionPolicy:
        """From what a user writes.

        Raises:
            ParameterError, UnknownNameError: see `registry.parse_params`; a pattern's errors name the pattern.
        """
        default = None if params is None else parse_params(params)
        rules = []
        for pattern, own in (per_key or {}).items():
            if not isinstance(pattern, str) or not pattern:
                raise parameter_error("per_key", pattern, "a pattern of key names such as '*.bias'")
            rules.append((pattern, parse_params(own, top_level=False)))
        return cls(default, tuple(rules))

    def params_for(self, key: Key, n_elements: int, dtype: np.dtype[Any]) -> Params:
        """The parameters for one key; those of `none` where it travels raw.

        Raises:
            ParameterError: a pattern names a codec for a key whose dtype cannot be compressed.
        """
        floating = dtype.name in FLOATS
        for pattern, params in self.per_key:
            if fnmatchcase(str(key), pattern):
                if not floating and params.type != CompressionType.NONE:
                    allowed = f"none: key {key!r}, which the pattern {pattern!r} matches, has dtype {dtype.name}"
                    error = parameter_error("type", params.type, allowed)
                    error.key = key
                    raise error
                return self._unless_small(params, n_elements)
        if self.default is None or not floating:
            return RAW
        return self._unless_small(self.default, n_elements)

    def whole(self, key: Key, dtype: np.dtype[Any]) -> bool:
        """Whether a key of this name, whatever its size, may be encoded whole, so that one server must hold it."""
        params = self.params_for(key, _ANY_SIZE, dtype)
        return bool(codec_class(params.type).unit == "key")

    def to_wire(self) -> dict[str, Any]:
        """Plain text data, in the order of the patterns; equal for equal policies."""
        return {
            "params": None if self.default is None else params_to_strings(self.default),
            "per_key": [[pattern, params_to_strings(params)] for pattern, params in self.per_key],
        }

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> CompressionPolicy:
        """The inverse of `to_wire`; errors as `parse`."""
        return cls.parse(data["params"], dict(data["per_key"]))

    @staticmethod
    def _unless_small(params: Params, n_elements: int) -> Params:
        if n_elements >= params.min_elements:
            return params
        return RAW if not params.momentum else NoneParams(momentum=params.momentum, on_nonfinite=params.on_nonfinite)


def policy_to_json(policy: CompressionPolicy | None) -> str:
    """The text that crosses the wire; equal for equal policies. None: everything travels raw."""
    return json.dumps(None if policy is None else policy.to_wire(), sort_keys=True)


def policy_from_json(text: str) -> CompressionPolicy | None:
    """The inverse of `policy_to_json`.

    Raises:
        ConfigError: it has not that form; errors as `CompressionPolicy.parse`.
    """
    try:
        data = json.loads(text)
        return None if data is None else CompressionPolicy.from_wire(data)
    except (KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as error:
        raise ConfigError(f"this is no compression setting: {text[:200]!r}") from error
