"""Every error this project raises. Nothing else leaves its public calls on purpose.

    KVStoreError
    ├── ConfigError              a setting is missing, malformed or contradicts another
    │   ├── ParameterError       one named parameter of a codec or an optimizer
    │   ├── UnknownNameError     a store, codec or optimizer nobody registered
    │   ├── MismatchError        the ranks of one job disagree about a setting
    │   └── AddressError         an address cannot be used: bind, interface, resolution
    ├── NotSupportedError        the call exists, but not on this store
    ├── KeyNotInitializedError   push or pull before init
    ├── KeyExistsError           second init of a key
    ├── ArrayError               shape or dtype differs from the key's
    ├── NonFiniteError           NaN or infinity in a gradient
    ├── CheckpointError          a saved file is damaged, foreign or does not fit
    ├── PayloadError             encoded bytes break their format or their limits
    ├── ProtocolError            a message breaks the wire format or its limits
    ├── ServerError              something failed on a server (an optimizer raised, for example)
    ├── JoinError                the job did not come together, or refused this process
    ├── PeerLostError            a process of the job died
    ├── PeerLeftError            a process closed while others still wait for it
    ├── OperationTimeoutError    the deadline of an operation passed
    └── ClosedError              the store is closed, or was inherited through fork

An error carries its facts as attributes (``error.key``, ``error.rank``, ...) beside the text. Facts are
numbers and strings only, so an error crosses the wire as (class name, text, facts): see `to_wire`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeAlias

Fact: TypeAlias = str | int | float | None


class KVStoreError(Exception):
    """Base of all. Unknown attributes read as None, so `error.rank` may always be asked for."""

    key: str | int | None = None
    rank: int | None = None
    role: str | None = None
    address: str | None = None

    def __init__(self, text: str, **facts: Fact) -> None:
        super().__init__(text)
        self.text = text
        self.facts = facts
        for name, fact in facts.items():
            setattr(self, name, fact)

    def __str__(self) -> str:
        return self.text

    def fresh(self) -> KVStoreError:
        """The same error without a traceback: one that is raised many times would collect all of them."""
        return from_wire(*to_wire(self))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self).__name__, self.text, self.facts))


class ConfigError(KVStoreError, ValueError):
    """A setting is missing, malformed or contradicts another one."""


class ParameterError(ConfigError):
    """One parameter is wrong: `parameter`, what was `given`, what is `allowed`."""

    parameter: str | None = None
    given: str | None = None
    allowed: str | None = None


class UnknownNameError(ConfigError):
    """Nobody registered this name; the text lists the known ones, nearest first."""

    name: str | None = None


class MismatchError(ConfigError):
    """The ranks of one job gave different values for the same setting."""


class AddressError(ConfigError):
    """An address cannot be used; the text says what to set instead."""


class NotSupportedError(KVStoreError, NotImplementedError):
    """The call exists, but not on this kind of store; the text names what to use."""


class KeyNotInitializedError(KVStoreError, LookupError):
    """A push or pull of a key for which this worker has not called init or broadcast."""


class KeyExistsError(KVStoreError, ValueError):
    """A second init of a key; the stored value is unchanged."""


class ArrayError(KVStoreError, ValueError):
    """An array does not have the key's shape or dtype, or a dtype that can be stored."""


class NonFiniteError(KVStoreError, ArithmeticError):
    """A gradient holds NaN or infinity: `key`, `rank`, `count`. Nothing was sent or changed."""

    count: int | None = None


class CheckpointError(KVStoreError):
    """A saved file is damaged, foreign or does not fit; the current state is unchanged."""

    path: str | None = None


class PayloadError(KVStoreError, ValueError):
    """Encoded bytes break their codec's format or limits."""


class ProtocolError(KVStoreError):
    """A message breaks the wire format or its limits."""


class ServerError(KVStoreError, RuntimeError):
    """Something failed on a server, which goes on serving."""


class JoinError(KVStoreError):
    """The job did not come together in time, or refused this process."""


class PeerLostError(KVStoreError, ConnectionError):
    """A process of the job died: `role`, `rank`, `age` (seconds since it was last heard of)."""

    age: float | None = None


class PeerLeftError(KVStoreError):
    """A process left the job by `close` while others still wait for it: `rank`, `rounds`."""

    rounds: int | None = None


class OperationTimeoutError(KVStoreError, TimeoutError):
    """An operation did not finish within its deadline; the text names what is missing."""


class ClosedError(KVStoreError):
    """The store was closed, or this process inherited it through fork."""


def _tree(root: type[KVStoreError]) -> Iterable[type[KVStoreError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


_BY_NAME: Mapping[str, type[KVStoreError]] = {cls.__name__: cls for cls in _tree(KVStoreError)}


def to_wire(error: BaseException) -> tuple[str, str, dict[str, Fact]]:
    """Return (class name, text, facts); a foreign exception travels as ServerError."""
    if isinstance(error, KVStoreError):
        return type(error).__name__, error.text, dict(error.facts)
    return ServerError.__name__, f"{type(error).__name__}: {error}", {}


def from_wire(name: str, text: str, facts: Mapping[str, Fact]) -> KVStoreError:
    """Rebuild an error; a class name outside this file becomes ServerError."""
    own = {fact: value for fact, value in facts.items() if _may_be_fact(fact)}
    return _BY_NAME.get(name, ServerError)(text, **own)


def _may_be_fact(name: str) -> bool:
    """A hostile peer must not replace what an exception is made of: `args`, `with_traceback`, `__class__`, ..."""
    taken = name in ("self", "text", "facts") or name.startswith("_") or hasattr(OSError, name)
    return name.isidentifier() and not taken


def _rebuild(name: str, text: str, facts: dict[str, Fact]) -> KVStoreError:
    return from_wire(name, text, facts)


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """Sort `known` by likeness to `name`, for messages about misspelt names."""
    return sorted(known, key=lambda other: (-difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio(), other))
