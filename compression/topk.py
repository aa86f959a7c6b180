"""The k elements of largest magnitude of each chunk, with error feedback: `topk`.

Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; Stich et al. (arXiv:1809.07599),
definition 2.1: the error is at most 1 - k / n of the squared norm. Selection is exact; of elements of equal magnitude
those of lowest index are taken; zeros are never sent, so a chunk of zeros takes no bytes and decodes to exact zeros.
Values may travel in half precision (`value_dtype`); what that loses stays in the residual too.

Bytes: the values, little endian, then the gaps between their indices as `sparse_numpy` describes them (about 1.3 bytes
each at 1 %; any index below 2^31). Meta: count, value (the dtype). A decoder believes no index: each is checked.
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
    Params,
    Payload,
    State,
    payload_bytes,
    payload_integer,
)
from kvstore.compression.kernels import family_for, kernels_for
from kvstore.compression.payloads import add_into
from kvstore.compression.sparse_numpy import LONGEST_CODE
from kvstore.compression.value_types import decode_values, encode_values, value_bytes, value_type
from kvstore.errors import PayloadError


class TopKParams(Params, frozen=True, tag=CompressionType.TOP_K.value):
    """ratio: share of the elements of each chunk that is sent, one at least. value_dtype: of the values sent."""

    ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.01
    value_dtype: Literal["float32", "float16", "bfloat16"] = "float32"


class TopK:
    """The largest elements with their indices; the others wait in the residual."""

    params_type: ClassVar[type[Params]] = TopKParams
    unit: ClassVar[Literal["chunk", "key"]] = "chunk"
    unbiased: ClassVar[bool] = False
    contraction: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    feedback: ClassVar[bool] = True

    def __init__(self, params: TopKParams | None = None) -> None:
        own = params or TopKParams()
        self.params: Params = own
        self.ratio, self.value_dtype = own.ratio, own.value_dtype

    def max_bytes(self, n: int, dtype: np.dtype[Any]) -> int:
        """The values, a byte for each gap, and one more for every 128 elements that gaps can add up to."""
        k = kept_of(n, self.ratio)
        return k * value_bytes(self.value_dtype) + min(k + n // 128, LONGEST_CODE * k)

    def encode(self, x: Array, state: State | None, ctx: Context) -> tuple[Payload, State | None]:
        """See `Codec.encode`."""
        return self._send(x, ctx)[0], state

    def encode_feedback(
        self, x: Array, residual: Array, state: State | None, ctx: Context
    ) -> tuple[Payload, State | None]:
        """residual += x, then send its largest elements and take what was sent of them off."""
        residual += x
        payload, values, indices = self._send(residual, ctx)
        residual[indices] -= decode_values(values, self.value_dtype)
        return payload, state

    def _send(self, x: Array, ctx: Context) -> tuple[Payload, Array, Array]:
        """The payload, and where x lies the encoded values and their indices."""
        indices = family_for("sparse", x).select_largest(x, kept_of(ctx.n, self.ratio))
        kernels = kernels_for(x)
        values = encode_values(x[indices], self.value_dtype)
        own = np.ascontiguousarray(kernels.to_host(indices))
        data = np.concatenate([kernels.to_host(values), family_for("sparse", own).pack_gaps(own)])
        return Payload(data, {"count": int(own.size), "value": self.value_dtype}), values, indices

    def check(self, payload: Payload, ctx: Context) -> None:
        """Count, value dtype, finite values, and every index; see `Codec.check`."""
        _checked(payload, ctx)

    def decode_add(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out += the values at their places; see `Codec.decode_add`."""
        kernels, family = kernels_for(out), family_for("sparse", out)
        sent = _checked(payload, ctx)
        values = decode_values(kernels.to_device(sent.values, out), sent.value_dtype)
        indices = kernels.to_device(sent.indices, out)
        add_into(out, lambda target: family.scatter_add(values, indices, target))

    def sum_encoded(self, payloads: Sequence[Payload], ctx: Context) -> Payload | None:
        """The places differ: payloads are added decoded."""
        return None


class _Sent(NamedTuple):
    """A payload that was found right: host arrays of encoded values and of indices."""

    values: Array
    value_dtype: str
    indices: Array


def kept_of(n: int, ratio: float) -> int:
    """How many of n elements are sent: the share, rounded, at least 1 of any."""
    return min(n, max(1, round(ratio * n)))


def _checked(payload: Payload, ctx: Context) -> _Sent:
    count = payload_integer(payload, "count", 0, ctx.n, ctx)
    dtype = value_type(payload, ctx)
    split = count * value_bytes(dtype)
    size = payload.nbytes
    if not split + count <= size <= split + LONGEST_CODE * count:
        text = f"{ctx}: the payload has {size} bytes, {count} elements take {split + count} or somewhat more"
        raise PayloadError(text, key=ctx.key, rank=ctx.rank)
    data = payload_bytes(payload, size, ctx)
    host = kernels_for(data).to_host(data)
    indices = family_for("sparse", host).unpack_gaps(host[split:], count, ctx.n)
    if indices is None:
        text = f"{ctx}: the payload's indices are not {count} ascending numbers below {ctx.n}"
        raise PayloadError(text, key=ctx.key, rank=ctx.rank)
    decode_values(host[:split], dtype, ctx)
    return _Sent(host[:split], dtype, indices)
