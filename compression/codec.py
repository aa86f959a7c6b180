"""What a codec is: the protocol, its parameters, what it is told and what it returns.

A codec turns one chunk (a contiguous run of a key's flattened elements) into bytes and back. It is an
immutable value built from its own typed parameters. It knows no message and no socket, and it keeps nothing
between calls: state goes in and comes out. Error feedback, policies and fallbacks to raw are wrapped around
it (`feedback`, `encoder`, `policy`). To add a codec: one file with a `Params` subclass and a class that
satisfies `Codec`, and one line in `registry`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeAlias, cast, runtime_checkable

import msgspec
import numpy as np

from kvstore.errors import ParameterError, PayloadError

Array: TypeAlias = Any
"""A NumPy or CuPy array; which of the two follows the gradient."""

Key: TypeAlias = str | int
Number: TypeAlias = int | float | str
State: TypeAlias = Mapping[str, Any]
"""What a codec keeps per (worker, key, chunk): names to arrays and numbers, so that it can be saved."""


class CompressionType(StrEnum):
    """The built-in codecs. Codecs of third parties keep the string of their entry point."""

    NONE = "none"
    TWO_BIT = "2bit"
    DGC = "dgc"
    DRIVE = "drive"
    EDEN = "eden"
    EF21 = "ef21"
    POWERSGD = "powersgd"


class OnNonFinite(StrEnum):
    """What happens to NaN and infinity: refuse the whole call, or send the chunk raw."""

    REFUSE = "refuse"
    PROPAGATE = "propagate"


class Feedback(StrEnum):
    """Whether what a push left unsent is added to the next one; `auto` is the codec's own advice."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """The parameters that every codec takes. A subclass adds its own and carries its name as `tag`.

    min_elements: keys with fewer elements travel raw (1,000 to 10,000 is sensible in training).
    on_nonfinite: what happens to a gradient with NaN or infinity.
    error_feedback: keep what was not sent and add it to the next push.
    momentum: momentum correction at the worker: u = momentum * u + gradient is sent in place of the gradient; the
        optimizer on the servers must then have no momentum of its own. 0: none.
    warmup_rounds: the first so many rounds of each key travel raw.
    seed: of the random numbers, for codecs that draw some.
    pull: how pulled values travel; only `none` (full precision) is available.
    """

    min_elements: Annotated[int, msgspec.Meta(ge=0)] = 0
    on_nonfinite: OnNonFinite = OnNonFinite.REFUSE
    error_feedback: Feedback = Feedback.AUTO
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    warmup_rounds: Annotated[int, msgspec.Meta(ge=0)] = 0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    pull: Literal["none"] = "none"

    @property
    def type(self) -> str:
        """The codec's registered name."""
        return cast(str, type(self).__struct_config__.tag)

    def __post_init__(self) -> None:
        for info in msgspec.structs.fields(self):
            check_parameter(info, getattr(self, info.name))


def check_parameter(info: msgspec.structs.FieldInfo, given: object, *, strict: bool = True) -> Any:
    """Return `given` as the field's type; with `strict=False` from text too.

    Raises:
        ParameterError: wrong type, out of range, or not finite (`inf` passes a mere `> 0`).
    """
    plain = given.item() if isinstance(given, np.generic) else given
    try:
        value = msgspec.convert(plain, info.type, strict=strict)
    except msgspec.ValidationError as error:
        raise parameter_error(info.name, given, allowed_values(info)) from error
    if isinstance(value, float) and not math.isfinite(value):
        raise parameter_error(info.name, given, allowed_values(info))
    return value


def parameter_error(name: str, given: object, allowed: str) -> ParameterError:
    """The one text for a parameter that is wrong."""
    text = f"compression parameter {name!r}: got {given!r}, allowed is {allowed}"
    return ParameterError(text, parameter=name, given=str(given), allowed=allowed)


def allowed_values(info: msgspec.structs.FieldInfo) -> str:
    """Say what a parameter may be, from its type alone: 'a finite number > 0', 'one of auto, on, off'."""
    kind = msgspec.inspect.type_info(info.type)
    match kind:
        case msgspec.inspect.EnumType(cls=cls):
            return "one of " + ", ".join(str(member.value) for member in cls)
        case msgspec.inspect.LiteralType(values=values):
            return "one of " + ", ".join(str(value) for value in values)
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            noun = "an integer" if isinstance(kind, msgspec.inspect.IntType) else "a finite number"
            return " ".join([noun, *_bounds(kind)])
    return str(info.type)


def _bounds(kind: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> list[str]:
    if kind.ge is not None and kind.ge == kind.le:
        return [f"equal to {kind.ge}"]
    limits = [(">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt)]
    return [" and ".join(f"{sign} {limit}" for sign, limit in limits if limit is not None)]


class Limits(msgspec.Struct, frozen=True):
    """What a decoder may believe of bytes from outside; checked before anything is allocated."""

    max_elements: int = 2**31
    max_payload_bytes: int = 2**31


class Context(msgspec.Struct, frozen=True, eq=False):
    """Which chunk is being encoded or decoded, known alike to both sides.

    Elements `offset .. offset + n` of the flattened key; `dtype` is the key's; `round` is the number of this
    push of the key by this worker, the first being 1. `shape`: the key's, and `earlier`:
    pushes before a `load`, not counted in `round`; encoders know them, decoders do not.
    """

    key: Key
    n: int
    chunk: int = 0
    offset: int = 0
    rank: int = 0
    round: int = 1
    seed: int = 0
    dtype: np.dtype[Any] = np.dtype(np.float32)
    limits: Limits = Limits()
    shape: tuple[int, ...] = ()
    earlier: int = 0

    def __str__(self) -> str:
        return f"key {self.key!r}, chunk {self.chunk}, rank {self.rank}"


class Payload(msgspec.Struct, frozen=True, eq=False):
    """One encoded chunk: the bare codec bytes, and the few numbers a decoder needs beside them.

    data: 1-d uint8 array (host, or device before it is sent); any bytes-like object where it was received.
    meta: travels in the message header. No magic, version or checksum is inside the bytes.
    """

    data: Array
    meta: Mapping[str, Number] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, header not counted."""
        return int(self.data.nbytes) if hasattr(self.data, "nbytes") else len(self.data)


@runtime_checkable
class Codec(Protocol):
    """The interface of all codecs.

    unit: what is encoded at once; `key` means the whole key, sent to the server of chunk 0.
    unbiased: the expected decoded value is the input. contraction: the error never exceeds the input.
    linear: `sum_encoded` adds payloads without decoding. accumulates: decoded pushes are increments of a sum
    that the server keeps. feedback: what `error_feedback=auto` means for this codec.
    """

    params_type: ClassVar[type[Params]]
    unit: ClassVar[Literal["chunk", "key"]]
    unbiased: ClassVar[bool]
    contraction: ClassVar[bool]
    linear: ClassVar[bool]
    accumulates: ClassVar[bool]
    feedback: ClassVar[bool]

    @property
    def params(self) -> Params:
        """The parameters this codec was built from."""
        ...

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """The most bytes that `n` elements of a key of `dtype` take; no payload is ever larger."""
        ...

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """Encode `x`: 1-d, contiguous, float32 (`none`: the key's dtype), finite, `ctx.n` elements; not changed.

        Returns the payload and the next state. The memory of `state` may be used again in the state returned.
        """
        ...

    def check(self, payload: Payload, ctx: Context) -> None:
        """Look at received bytes before they are kept: after this `decode_add` of them cannot fail.

        Raises:
            PayloadError: bytes or meta break the format.
        """
        ...

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Add the decoded chunk to `out`, 1-d of `ctx.n` elements of a floating dtype.

        Everything needed is in `payload` and `ctx`: the parameters of this instance play no part, so a push
        encoded before a change of setting is decoded as it was encoded.

        Raises:
            PayloadError: bytes or meta break the format; `out` is then unchanged.
        """
        ...

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """Linear codecs: the encoding of the sum. None where these payloads cannot be added undecoded."""
        ...


@runtime_checkable
class FusedFeedback(Protocol):
    """A codec that can encode x + residual and update the residual in one pass."""

    def encode_feedback(
        self, x: Array, residual: Array, state: State | None, ctx: Context
    ) -> tuple[Payload, State | None]:
        """residual <- residual + x - decoded, in place; the payload's size is exactly `max_bytes`."""
        ...


@runtime_checkable
class SizedByShape(Protocol):
    """A codec of whole keys whose size follows from the key's shape alone."""

    def encoded_bytes(self, shape: tuple[int, ...]) -> int | None:
        """Bytes that a key of this shape takes; None where it travels raw."""
        ...


@runtime_checkable
class MaskingMomentum(Protocol):
    """A codec that stops the momentum of what it sent (Lin et al. 2018, arXiv:1712.01887, section 3.2)."""

    def clipped(self, norm: float) -> float:
        """Factor for a gradient of this l2 norm before it enters the momentum; 1 leaves it."""
        ...


@runtime_checkable
class DecodesInto(Protocol):
    """A codec that can decode into an array faster than add to one."""

    def decode_into(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out = the decoded payload; `out` need not be initialised."""
        ...


@runtime_checkable
class Accumulating(Protocol):
    """A codec that can decode and add several payloads in one pass, independent of their order."""

    def accumulate(self, payloads: Sequence[Payload], out: Array, ctxs: Sequence[Context]) -> None:
        """out += the sum of the decoded payloads, one context each."""
        ...


def satisfies(codec: object, protocol: type[Any]) -> bool:
    """Whether a codec (None does not) offers what one of the protocols above asks for."""
    kinds: tuple[Any, Any] = type(codec), protocol
    return _offers(*kinds)


@cache
def _offers(codec: type[Any], protocol: type[Any]) -> bool:
    return issubclass(codec, protocol)  # asked for every chunk, and slow to find out


def payload_bytes(payload: Payload, expected: int, ctx: Context) -> Array:
    """The payload as a 1-d uint8 array of exactly `expected` bytes, without a copy.

    Raises:
        PayloadError: another length.
    """
    data = payload.data
    if not hasattr(data, "dtype"):
        data = np.frombuffer(data, np.uint8)
    if data.nbytes != expected:
        text = f"{ctx}: the payload has {data.nbytes} bytes, {ctx.n} elements take {expected}"
        raise PayloadError(text, key=ctx.key, rank=ctx.rank)
    return data


def payload_number(payload: Payload, name: str, ctx: Context) -> float:
    """A finite number from the payload's meta.

    Raises:
        PayloadError: it is missing, not a number, or not finite.
    """
    value = payload.meta.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        text = f"{ctx}: the payload's {name} is {value!r}, a finite number is needed"
        raise PayloadError(text, key=ctx.key, rank=ctx.rank)
    return float(value)


_LARGEST = float(np.finfo(np.float64).max)
