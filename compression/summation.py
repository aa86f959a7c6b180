"""Adds encoded chunks into an accumulator: what a server does with the pushes of one round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvstore.compression.codec import Accumulating, Array, Context, Payload
from kvstore.compression.registry import decoder
from kvstore.errors import ArrayError


@runtime_checkable
class DecodesInto(Protocol):
    """A codec that can decode into an array faster than add to one."""

    def decode_into(self, payload: Payload, out: Array, ctx: Context) -> None:
        """out = decoded payload."""
        ...


def decode_into(codec: str, payload: Payload, out: Array, ctx: Context) -> None:
    """out = the decoded chunk; `out` need not be initialised.

    Raises:
        PayloadError: bytes or meta break the format. UnknownNameError: no such codec.
    """
    own = decoder(codec)
    _check_size(out, ctx)
    if isinstance(own, DecodesInto):
        own.decode_into(payload, out, ctx)
    else:
        out[...] = 0
        own.decode_add(payload, out, ctx)


def decode_add(codec: str, payload: Payload, out: Array, ctx: Context) -> None:
    """out += the decoded chunk; errors as `decode_into`."""
    _check_size(out, ctx)
    decoder(codec).decode_add(payload, out, ctx)


def accumulate(codecs: Sequence[str], payloads: Sequence[Payload], out: Array, ctxs: Sequence[Context]) -> None:
    """out += the sum of these chunks, given in rank order; errors as `decode_into`.

    Chunks of one codec that can count (2bit with one threshold) are added in one pass and rounded once; all
    others one after another. The result depends on the chunks and their order alone. Where an error is raised
    by the second or a later chunk, `out` may hold the earlier ones: check payloads as they arrive.
    """
    for ctx in ctxs:
        _check_size(out, ctx)
    if len(codecs) > 1 and len(set(codecs)) == 1:
        own = decoder(codecs[0])
        if isinstance(own, Accumulating):
            own.accumulate(payloads, out, ctxs)
            return
    for codec, payload, ctx in zip(codecs, payloads, ctxs, strict=True):
        decoder(codec).decode_add(payload, out, ctx)


def _check_size(out: Array, ctx: Context) -> None:
    if out.ndim != 1 or out.size != ctx.n:
        raise ArrayError(
            f"{ctx}: {ctx.n} elements do not fit an array of shape {out.shape}", key=ctx.key, rank=ctx.rank
        )
