"""Everything a server holds of one chunk, out to `save` and back from `load`. Pure.

Arrays travel by name: 'value' (the key's dtype), 'master' (half-precision keys only), 'kept:RANK' for each sum of
increments (-1: of all ranks), 'state:NAME' for each of the optimizer's arrays. Nothing is named by the wire but what
the installed optimizer itself declares.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvstore.dtypes import accumulator, as_bytes_view, from_bytes, named_dtype
from kvstore.errors import CheckpointError
from kvstore.machine import Send
from kvstore.messages import Frame, ReadState, State, WriteState
from kvstore.optimizer import Optimizer
from kvstore.server.aggregate import Array
from kvstore.server.stored import StoredChunk, StoredKey

PREFIX = "state:"
KEPT = "kept:"
_KEPT = re.compile(r"kept:(-1|[0-9]{1,7})")


def read_state(sender: str, message: ReadState, chunk: StoredChunk, optimizer: str | None) -> Send:
    """Answer a ReadState. The optimizer's arrays are copied: they change in place."""
    arrays: dict[str, Array] = {"value": chunk.value} if message.values else {}
    if message.values and chunk.master.dtype != chunk.value.dtype:
        arrays["master"] = chunk.master
    if message.values:
        arrays |= {f"{KEPT}{rank}": array for rank, array in chunk.kept.items()}
    arrays |= {PREFIX + name: array.copy() for name, array in (chunk.state or {}).items()}
    state = State(
        sequence=message.sequence, key=message.key, chunk=message.chunk, step=chunk.step, names=list(arrays),
        dtypes=[array.dtype.name for array in arrays.values()], optimizer=optimizer,
    )  # fmt: skip
    return Send(sender, state, [as_bytes_view(array) for array in arrays.values()])


def write_state(
    message: WriteState,
    frames: Sequence[Frame],
    stored: StoredKey,
    chunk: StoredChunk,
    optimizer: Optimizer[Any] | None,
) -> None:
    """Set value and master if the message names them, and the optimizer's state: without any it starts afresh.

    Raises:
        CheckpointError: names, sizes or dtypes do not fit the key or the optimizer; nothing is changed.
    """
    arrays = _arrays(message, frames)
    value = arrays.pop("value", None)
    master = arrays.pop("master", None)
    state = {name.removeprefix(PREFIX): array for name, array in arrays.items() if name.startswith(PREFIX)}
    kept = {name: array for name, array in arrays.items() if _KEPT.fullmatch(name)}
    if len(state) + len(kept) != len(arrays):
        raise CheckpointError(f"key {message.key!r}: unknown parts {sorted(arrays)}", key=message.key)
    if master is not None and (value is None or chunk.master.dtype == chunk.value.dtype):
        raise CheckpointError(f"key {message.key!r}: a master goes with a half-precision value", key=message.key)
    _check("value", value, chunk.value, message)
    _check("master", master, chunk.master, message)
    for name, array in kept.items():
        _check(name, array, chunk.master, message)
    fresh = _fresh_state(stored, chunk, optimizer, message) if state else {}
    for name, array in state.items():
        if name not in fresh:
            raise CheckpointError(f"key {message.key!r}: the optimizer has no state {name!r}", key=message.key)
        _check(name, array, fresh[name], message)
    if value is not None:
        chunk.value = value
        chunk.master = master if master is not None else value.astype(accumulator(value.dtype), copy=False)
    for name, array in state.items():
        fresh[name][...] = array
    chunk.state = fresh or None
    if not state:
        stored.state = None
    if value is not None:
        chunk.kept = {int(name.removeprefix(KEPT)): array for name, array in kept.items()}
    chunk.start_counting(message.step)


def _arrays(message: WriteState, frames: Sequence[Frame]) -> dict[str, Array]:
    if not len(message.names) == len(message.dtypes) == len(frames):
        raise CheckpointError(f"key {message.key!r}: {len(message.names)} parts, {len(frames)} frames", key=message.key)
    named = zip(message.names, message.dtypes, frames, strict=True)
    return {name: from_bytes(frame, named_dtype(dtype, message.key)).copy() for name, dtype, frame in named}


def _check(name: str, given: Array | None, own: Array, message: WriteState) -> None:
    if given is not None and (given.dtype != own.dtype or given.size != own.size):
        raise CheckpointError(
            f"key {message.key!r}, chunk {message.chunk}: {name} has {given.size} elements of {given.dtype}, "
            f"here it has {own.size} of {own.dtype}", key=message.key,
        )  # fmt: skip


def _fresh_state(
    stored: StoredKey, chunk: StoredChunk, optimizer: Optimizer[Any] | None, message: WriteState
) -> dict[str, Array]:
    """Arrays to write into: parts of the whole key's where the optimizer needs it whole."""
    if optimizer is None:
        raise CheckpointError(f"key {message.key!r}: optimizer state, but no optimizer is set", key=message.key)
    if not stored.whole:
        return optimizer.create_state(chunk.master.size, chunk.master.dtype)
    if not stored.complete:
        raise CheckpointError(f"key {message.key!r}: not all of its chunks have a value", key=message.key)
    if stored.state is None:
        stored.state = optimizer.create_state(stored.elements, chunk.master.dtype)
    part = slice(chunk.start, chunk.start + chunk.master.size)
    return {name: array[part] for name, array in stored.state.items()}
