"""Gradients and values of one call as parts of an operation: encoded chunk after chunk, while earlier ones travel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.compression.encoder import EncodedChunk, Prepared
from kvstore.dist_key import Destination, DistKey
from kvstore.keys import mirrored
from kvstore.messages import Key, PushEntry
from kvstore.operation import Part, Pull, Push
from kvstore.store import Keys
from kvstore.wire import frame_bytes

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
            batch.append(_push(key, chunk, priority, borrowed=not copy))
            if destinations is not None:
                asked = key.chunks if chunk.whole else (chunk.index,)
                batch += [_pull(key, destinations[position], index, priority) for index in asked]
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


def _push(key: DistKey, chunk: EncodedChunk, priority: int, borrowed: bool) -> Push:
    key.counters.raw_bytes += chunk.raw_nbytes
    key.counters.sent_bytes += chunk.nbytes
    entry = PushEntry(key.key, chunk.index, key.round, chunk.codec, dict(chunk.payload.meta), chunk.whole)
    stands_for = len(key.chunks) if chunk.whole else 1
    return Push(key.server(chunk.index), entry, memoryview(chunk.payload.data), priority, borrowed, stands_for)


def _pull(key: DistKey, destination: Destination, chunk: int, priority: int) -> Pull:
    target = destination.chunk(chunk)
    key.counters.pulled_bytes += target.size
    return Pull(key.server(chunk), key.version(chunk), target, priority)


def finisher(
    key: Keys,
    out: Any,
    keys: Sequence[DistKey],
    given: Sequence[tuple[Key, list[Any]]],
    destinations: Sequence[Destination],
) -> Callable[[], Any]:
    """What a finished pull does: fill the outs, and return the call's result in the form of its `key`."""

    started = time.perf_counter()

    def finish() -> Any:
        waited = (time.perf_counter() - started) / max(len(keys), 1)
        new = [destination.finish() for destination in destinations]
        for one in keys:
            one.counters.pulls += 1
            one.counters.wait_seconds += waited
        if out is not None and all(outs for _, outs in given):
            return out
        results = [
            value if not outs else outs[0] if len(outs) == 1 else outs
            for value, (_, outs) in zip(new, given, strict=True)
        ]
        return mirrored(key, results)

    return finish


def pushed_bytes(part: Part) -> int:
    """Size of an encoded chunk, 0 for other parts."""
    return frame_bytes(part.frame) if isinstance(part, Push) else 0
