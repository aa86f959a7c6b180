"""What `key` and its companions may be: one key, a list or a mapping of them, one array or one per device.

Everything here checks; nothing changes. A call is normalised whole before any of it takes effect.
"""

from __future__ import annotations

from collections.abc import KeysView, Mapping, Sequence
from typing import Any

import numpy as np

from kvstore.arrays import is_array
from kvstore.errors import ArrayError, ParameterError
from kvstore.messages import Key

LONGEST = 2048
"""Bytes of UTF-8 in a key."""
_LEAST, _GREATEST = -(2**63), 2**63 - 1


def check_key(key: object) -> Key:
    """Return the key as a plain int or str; NumPy integers become int. 3 and '3' are different keys.

    Raises:
        ParameterError: neither, a bool, outside int64, or text that is no valid Unicode.
    """
    if isinstance(key, str):
        return _text(str(key))
    if isinstance(key, np.integer) or (isinstance(key, int) and not isinstance(key, bool)):
        number = int(key)
        if not _LEAST <= number <= _GREATEST:
            raise _refused(key, f"integers from {_LEAST} to {_GREATEST} (-2**63 to 2**63 - 1)")
        return number
    raise _refused(key, f"a str or an int, not {type(key).__name__}")


def keys_of(key: object) -> list[Key]:
    """Return the keys that a `key` argument names, in order.

    Raises:
        ParameterError: a key is no key (see `check_key`), or occurs twice.
    """
    keys = [check_key(one) for one in key] if isinstance(key, list | tuple | Mapping | KeysView) else [check_key(key)]
    seen: set[Key] = set()
    for one in keys:
        if one in seen:
            raise ParameterError(
                f"key {one!r} occurs twice in one call: each key once; arrays of several devices go in a list",
                parameter="key", given=repr(one), allowed="distinct keys",
            )  # fmt: skip
        seen.add(one)
    return keys


def pair_values(key: object, value: Any, what: str) -> list[tuple[Key, list[Any]]]:
    """Return (key, arrays, one per device) for each key, from `key` and `value` as the user gave them.

    Args:
        key: one key, a list of keys, or a mapping from keys to values (then `value` must be None).
        value: one value, or a list with one per key. A value is an array, a list of arrays, a number or a nested list
            of numbers.
        what: the call, for messages: 'push'.

    Raises:
        ParameterError: about a key. ArrayError: values are missing, too many, or no arrays.
    """
    keys = keys_of(key)
    if isinstance(key, Mapping):
        if value is not None:
            raise ArrayError(f"{what}: a mapping of keys holds the values already; give no second one")
        value = list(key.values())
    values = _one_per_key(key, keys, value, what)
    return [(one, _per_device(one, given, what)) for one, given in zip(keys, values, strict=True)]


def pair_outs(key: object, out: Any, what: str) -> list[tuple[Key, list[Any]]]:
    """Return (key, arrays to write into) for each key; no arrays where the call is to make a new one.

    Args:
        key: one key, a list of keys, or a mapping (of which only the keys count here).
        out: None, one array (or list of arrays that all get the value), a list with one entry per key, or, where `key`
            is a mapping or a list, a mapping with the same keys.
    """
    keys = keys_of(key)
    if out is None:
        return [(one, []) for one in keys]
    if isinstance(out, Mapping):
        if set(keys_of(out)) != set(keys):
            raise ArrayError(f"{what}: out has the keys {list(out)!r}, the call {keys!r}: give the same")
        found = {check_key(one): given for one, given in out.items()}
        outs: Sequence[Any] = [found[one] for one in keys]
    else:
        outs = _one_per_key(key, keys, out, what)
    return [(one, _per_device(one, given, what)) for one, given in zip(keys, outs, strict=True)]


def mirrored(key: object, results: Sequence[Any]) -> Any:
    """Give results, one per key, the form of `key`: one, a list, or a dict."""
    if isinstance(key, Mapping):
        return dict(zip(keys_of(key), results, strict=True))
    return list(results) if isinstance(key, list | tuple | KeysView) else results[0]


def _one_per_key(key: object, keys: list[Key], value: Any, what: str) -> Sequence[Any]:
    if not isinstance(key, list | tuple | Mapping | KeysView):
        return [value]
    if not isinstance(value, list | tuple):
        raise ArrayError(f"{what}: {len(keys)} keys need a list of {len(keys)} values, not a {type(value).__name__}")
    if len(value) != len(keys):
        raise ArrayError(f"{what}: {len(keys)} keys, but {len(value)} values: give one value per key")
    return value


def _per_device(key: Key, value: Any, what: str) -> list[Any]:
    """A list of arrays is one array per device; a list of numbers is one array."""
    if value is None:
        raise ArrayError(f"{what}: nothing given for key {key!r}", key=key)
    if not isinstance(value, list | tuple):
        return [value]
    if not value:
        raise ArrayError(f"{what}: the list of arrays for key {key!r} is empty", key=key)
    arrays = [is_array(one) for one in value]
    if any(arrays) and not all(arrays):
        raise ArrayError(f"{what}: the list for key {key!r} mixes arrays with other things", key=key)
    return list(value) if all(arrays) else [value]


def _text(key: str) -> str:
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise _refused(key, "text that UTF-8 can encode (no lone surrogates)") from error
    if size > LONGEST:  # a message of 1024 keys has to stay within the limit of headers
        raise ParameterError(
            f"a key of {size} bytes, {key[:40]!r}..., is too long: allowed are {LONGEST} bytes of UTF-8",
            parameter="key", given=f"{size} bytes", allowed=f"at most {LONGEST} bytes",
        )  # fmt: skip
    return key


def _refused(key: object, allowed: str) -> ParameterError:
    return ParameterError(
        f"{key!r} cannot be a key: allowed is {allowed}", parameter="key", given=repr(key), allowed=allowed
    )
