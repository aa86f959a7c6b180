"""A random share of the elements, the same ones at every worker, so that no indices are sent: `randomk`.

Stich et al. (arXiv:1809.07599), definition 2.1 (rand-k). One element is drawn from each of k runs of n / k elements
(`sparse_numpy`, strata): without replacement, and every element with the same chance. The draw depends on the seed, the
key, the chunk and the round only; seed and round travel in the meta, so a receiver needs no settings.

Biased (default): values as they are, a contraction with delta = k / n, with error feedback. Unbiased: values times
n / k; its variance is n / k - 1 times the input, so error feedback would diverge and is refused, unless `scaled`
divides by 1 + that, which is the biased form again.

Linear: payloads of one round, seed and key add value by value without being decoded, in rank order.

Bytes: k values, little endian. Meta: count, seed, round, value (the dtype; a sum is float32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np

from kvstore.compression.codec import (
    Array,
    CompressionType,
    Context,
    Number,
    Params,
    Payload,
    State,
    payload_bytes,
    payload_integer,
)
from kvstore.compression.kernels import family_for, kernels_for
from kvstore.compression.payloads import add_into
from kvstore.compression.philox import Purpose, stream_key
from kvstore.compression.topk import kept_of
from kvstore.compression.value_types import decode_values, encode_values, value_bytes, value_type

_LARGEST = 2**63 - 1


class RandomKParams(Params, frozen=True, tag=CompressionType.RANDOM_K.value):
    """ratio: share of the elements of each chunk that is sent, one at least. value_dtype: of the values sent.

    unbiased: multiply by n / k; right on average, and noisy. scaled: take that back, for error feedback.
    """

    ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.01
    unbiased: bool = False
    scaled: bool = False
    value_dtype: Literal["float32", "float16", "bfloat16"] = "float32"


class RandomK:
    """Random elements that all workers agree on; the others wait in the residual."""

    params_type: ClassVar[type[Params]] = RandomKParams
    unit: ClassVar[Literal["chunk", "key"]] = "chunk"
    unbiased: bool
    contraction: bool
    linear: ClassVar[bool] = True
    accumulates: ClassVar[bool] = False
    feedback: bool

    def __init__(self, params: RandomKParams | None = None) -> None:
        own = params or RandomKParams()
        self.params: Params = own
        self.ratio, self.value_dtype = own.ratio, own.value_dtype
        self.unbiased = own.unbiased and not own.scaled
        self.contraction = self.feedback = not self.unbiased

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """The values; always exactly this."""
        return kept_of(n, self.ratio) * value_bytes(self.value_dtype)

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """See `Codec.encode`."""
        count = kept_of(ctx.n, self.ratio)
        values = kernels_for(x).empty_bytes(4 * count, x).view(np.float32)
        key = _stream(ctx.seed, ctx.round, ctx)
        family_for("sparse", x).gather_strata(x, key, ctx.chunk, self.unbiased, values)
        if self.unbiased:
            values.clip(-_MOST, _MOST, out=values)
        meta: dict[str, Number] = {"count": count, "seed": ctx.seed, "round": ctx.round, "value": self.value_dtype}
        return Payload(encode_values(values, self.value_dtype), meta), state

    def encode_feedback(
        self, x: Array, residual: Array, state: State | None, ctx: Context
    ) -> tuple[Payload, State | None]:
        """residual += x, then send elements of it and take what was sent of them off."""
        residual += x
        payload, state = self.encode(residual, state, ctx)
        sent = -decode_values(payload.data, self.value_dtype)
        family_for("sparse", x).scatter_strata_add(sent, _stream(ctx.seed, ctx.round, ctx), ctx.chunk, residual)
        return payload, state

    def check(self, payload: Payload, ctx: Context) -> None:
        """Count, byte count, seed, round, and finite values; see `Codec.check`."""
        _checked(payload, ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out += the values at their places; see `Codec.decode_add`."""
        sent, family = _checked(payload, ctx), family_for("sparse", out)
        values = decode_values(kernels_for(out).to_device(sent.values, out), sent.value_dtype)
        key = _stream(sent.seed, sent.round, ctx)
        add_into(out, lambda target: family.scatter_strata_add(values, key, ctx.chunk, target))

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """The sum of the values in the order given; None where places differ, or where it leaves float32.

        Raises:
            PayloadError: a payload breaks the format.
        """
        sent = [_checked(payload, ctx) for payload in payloads]
        if len({(one.seed, one.round, one.kept) for one in sent}) != 1:
            return None
        total = decode_values(sent[0].values, sent[0].value_dtype).copy()
        with np.errstate(over="ignore"):
            for one in sent[1:]:
                total += decode_values(one.values, one.value_dtype)
        if not bool(np.isfinite(total).all()):
            return None
        first = sent[0]
        summed: dict[str, Number] = {"count": first.kept, "seed": first.seed, "round": first.round, "value": "float32"}
        return Payload(total.view(np.uint8), summed)


_MOST = np.finfo(np.float32).max


class _Sent(NamedTuple):
    """A payload that was found right."""

    values: Array
    value_dtype: str
    kept: int
    seed: int
    round: int


def _stream(seed: int, round: int, ctx: Context) -> int:
    """The key of the random numbers; rank plays no part."""
    return stream_key(seed, Purpose.MASK, 0, ctx.key, round)


def _checked(payload: Payload, ctx: Context) -> _Sent:
    count = payload_integer(payload, "count", 0, ctx.n, ctx)
    seed, round = (payload_integer(payload, name, 0, _LARGEST, ctx) for name in ("seed", "round"))
    dtype = value_type(payload, ctx)
    data = payload_bytes(payload, count * value_bytes(dtype), ctx)
    decode_values(data, dtype, ctx)
    return _Sent(data, dtype, count, seed, round)
