"""Gradients and values of one call as parts of an operation: encoded chunk after chunk, while earlier ones travel."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvstore.compression.encoder import EncodedChunk, Prepared
from kvstore.dist_key import Destination, DistKey
from kvstore.messages import PushEntry
from kvstore.session import Part, Pull, Push

BATCH_BYTES = 1 << 20
"""What is handed to the sending thread at once: large enough to fuse small keys, small enough to overlap."""
RAW_BATCH_BYTES = 4 << 20
"""The same, as the raw size of what compressed chunks stand for."""


def push_parts(
    keys: Sequence[tuple[DistKey, Prepared]],
    destinations: Sequence[Destination] | None,
    priority: int,
    copy: bool,
) -> Iterator[list[Part]]:
    """Encode gradients, and ask for the new values where `destinations` are given; yields batches of parts.

    Counts a round for each key. With `copy=False` raw chunks share the gradient's memory.
    """
    batch: list[Part] = []
    waiting = raw_waiting = 0
    for position, (key, prepared) in enumerate(keys):
        key.round += 1
        key.counters.pushes += 1
        started = time.perf_counter()
        for chunk in key.encoder.encode(prepared, copy=copy):
            key.counters.encode_seconds += time.perf_counter() - started
            batch.append(_push(key, chunk, priority))
            if destinations is not None:
                batch.append(_pull(key, destinations[position], chunk.index, priority))
            waiting += chunk.nbytes
            raw_waiting += chunk.raw_nbytes
            if waiting >= BATCH_BYTES or raw_waiting >= RAW_BATCH_BYTES:
                yield batch
                batch, waiting, raw_waiting = [], 0, 0
            started = time.perf_counter()
    yield batch


def pull_parts(keys: Sequence[DistKey], destinations: Sequence[Destination], priority: int) -> list[Part]:
    """Ask for the values of keys at the version that contains all own pushes."""
    return [
        _pull(key, destination, chunk, priority)
        for key, destination in zip(keys, destinations, strict=True)
        for chunk in key.chunks
    ]


def _push(key: DistKey, chunk: EncodedChunk, priority: int) -> Push:
    key.counters.raw_bytes += chunk.raw_nbytes
    key.counters.sent_bytes += chunk.nbytes
    entry = PushEntry(key.key, chunk.index, key.round, chunk.codec, dict(chunk.payload.meta))
    return Push(key.server(chunk.index), entry, memoryview(chunk.payload.data), priority)


def _pull(key: DistKey, destination: Destination, chunk: int, priority: int) -> Pull:
    target = destination.chunk(chunk)
    key.counters.pulled_bytes += target.size
    return Pull(key.server(chunk), key.version(chunk), target, priority)
