"""Checks of values that rank 0 sets, and the keys that they create. Pure."""

from __future__ import annotations

import math

from kvstore.dtypes import named_dtype
from kvstore.errors import ConfigError, KeyExistsError, ProtocolError
from kvstore.messages import AssignEntry, Frame
from kvstore.partition import chunk_count, chunk_range
from kvstore.server.stored import StoredKey

MAX_ELEMENTS = 2**62


def check_assignment(
    entry: AssignEntry, frame: Frame, stored: StoredKey | None, chunk_elements: int, needs_whole: bool
) -> None:
    """Raise before anything changes if this chunk cannot be set.

    Args:
        stored: the key as it is, None if it is new.
        needs_whole: the installed optimizer needs each array whole.

    Raises:
        ProtocolError, ArrayError: shape, chunk and bytes do not fit each other. ConfigError: it should be whole.
        KeyExistsError: an init of a key that has been overwritten since.
    """
    dtype = named_dtype(entry.dtype, entry.key)
    elements = math.prod(entry.shape)
    if elements > MAX_ELEMENTS:
        raise ProtocolError(f"key {entry.key!r}: shape {entry.shape} has more than 2**62 elements", key=entry.key)
    if not entry.chunk < chunk_count(elements, chunk_elements):
        raise ProtocolError(f"key {entry.key!r} of shape {entry.shape} has no chunk {entry.chunk}", key=entry.key)
    start, stop = chunk_range(entry.chunk, elements, chunk_elements)
    size = memoryview(frame).nbytes
    if size != (stop - start) * dtype.itemsize:
        raise ProtocolError(
            f"chunk {entry.chunk} of key {entry.key!r} came with {size} bytes, {stop - start} elements of "
            f"{entry.dtype} take {(stop - start) * dtype.itemsize}", key=entry.key,
        )  # fmt: skip
    if needs_whole and not entry.whole and size < elements * dtype.itemsize:
        raise ConfigError(
            f"key {entry.key!r}: the installed optimizer needs each array whole, but it comes spread over chunks: "
            f"call set_optimizer on every rank before init",
            key=entry.key,
        )
    if stored and entry.epoch == 1 and entry.chunk in stored.chunks and stored.chunks[entry.chunk].epoch > 1:
        raise KeyExistsError(f"key {entry.key!r} is already initialised; overwrite it by broadcast", key=entry.key)


def new_key(entry: AssignEntry, chunk_elements: int, num_servers: int) -> StoredKey:
    """The key that an assignment creates or redefines; it knows how many of its chunks lie on this server."""
    elements = math.prod(entry.shape)
    count = chunk_count(elements, chunk_elements)
    first = 0 if entry.whole else entry.chunk % num_servers
    expected = len(range(first, count, 1 if entry.whole else num_servers))
    dtype = named_dtype(entry.dtype, entry.key)
    return StoredKey(
        entry.key, entry.shape, dtype, elements, entry.sync, entry.average, entry.whole, expected, entry.staleness,
        entry.on_stale,
    )  # fmt: skip
