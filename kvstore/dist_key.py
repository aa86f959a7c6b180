"""A worker's view of one key: what it looks like, where its chunks are, how far this worker is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.arrays import Template, like, write_into
from kvstore.compression.encoder import KeyEncoder
from kvstore.dtypes import DType, NDArray
from kvstore.messages import ChunkEntry, Key
from kvstore.on_stale import OnStale
from kvstore.partition import chunk_count, chunk_range, server_of
from kvstore.reduction import check_match, flattened, sum_in_order


@dataclass
class KeyCounters:
    """Since `create`; bytes of payloads, seconds of this worker's time."""

    pushes: int = 0
    pulls: int = 0
    raw_bytes: int = 0
    sent_bytes: int = 0
    pulled_bytes: int = 0
    encode_seconds: float = 0.0
    wait_seconds: float = 0.0


@dataclass(eq=False)
class DistKey:
    """`round`: pushes of this worker; `epoch`: assignments (init, broadcast) taken part in; `elements`: its size."""

    key: Key
    template: Template
    chunk_elements: int
    num_servers: int
    rank: int
    whole: bool = False
    staleness: int = -1
    on_stale: OnStale = OnStale.BLOCK
    round: int = 0
    epoch: int = 0
    counters: KeyCounters = field(default_factory=KeyCounters)

    def __post_init__(self) -> None:
        self.elements = math.prod(self.template.shape)
        self.encoder = self.new_encoder()

    def new_encoder(self) -> KeyEncoder:
        """An encoder for this key that has seen nothing yet."""
        return KeyEncoder(
            self.key,
            self.elements,
            self.dtype,
            rank=self.rank,
            chunk_elements=self.chunk_elements,
            shape=self.template.shape,
        )

    @property
    def dtype(self) -> DType:
        """The key's element type."""
        return self.template.dtype

    @property
    def chunks(self) -> range:
        """Indices of its chunks."""
        return range(chunk_count(self.elements, self.chunk_elements))

    def part(self, chunk: int) -> slice:
        """The chunk's elements."""
        return slice(*chunk_range(chunk, self.elements, self.chunk_elements))

    def server(self, chunk: int) -> int:
        """The server that holds it."""
        return server_of(self.key, chunk, self.num_servers, self.whole)

    @property
    def servers(self) -> set[int]:
        """All servers that hold a part of it."""
        return {self.server(chunk) for chunk in self.chunks[: self.num_servers]}

    def version(self, chunk: int) -> ChunkEntry:
        """What a pull by this worker asks for."""
        return ChunkEntry(self.key, chunk, self.round, self.epoch)

    def check(self, array: Any, what: str) -> None:
        """Raise ArrayError unless `array` has the key's shape and dtype."""
        check_match(self.template, array, self.key, what)

    def reduce(self, arrays: Sequence[Any], on_device: bool) -> Any:
        """Return the flat sum of the arrays of several devices, in their order and the key's dtype.

        One array is taken as it is, without a copy. `on_device`: CuPy arrays stay on their device.
        """
        flats = [flattened(array, self.key, self.dtype, on_device) for array in arrays]
        return flats[0] if len(flats) == 1 else sum_in_order(flats, self.dtype).astype(self.dtype, copy=False)


class Destination:
    """Where the pulled chunks of one key go: straight into `out` where its memory allows, else into a new array."""

    def __init__(self, key: DistKey, outs: Sequence[Any]) -> None:
        self._key = key
        self._outs = outs
        self._direct = _memory_of(outs[0], key) if len(outs) == 1 else None
        self.flat = self._direct if self._direct is not None else np.empty(key.elements, key.dtype)
        self._bytes = self.flat.view(np.uint8)

    def chunk(self, chunk: int) -> NDArray:
        """The bytes of one chunk."""
        part, size = self._key.part(chunk), self._key.dtype.itemsize
        return self._bytes[part.start * size : part.stop * size]

    def finish(self) -> Any:
        """All chunks are in: fill the outs; without any, return a new array like the one given to `init`."""
        key = self._key
        if self._direct is None:
            for out in self._outs:
                write_into(out, self.flat, key.key)
        if self._outs:
            return None
        if key.template.kind == "numpy":
            return self.flat.reshape(key.template.shape)
        return like(key.template, self.flat)


def _memory_of(out: Any, key: DistKey) -> NDArray | None:
    """A flat view of a host array's own memory, None where that has no such view."""
    if not isinstance(out, np.ndarray):
        return None
    usable = out.flags.c_contiguous and out.flags.aligned and out.dtype.isnative
    return out.reshape(-1) if usable else None


def listed(keys: Sequence[DistKey]) -> str:
    """For messages: "key 'w'", "5 keys ('a', 'b', 'c', ...)"."""
    names = ", ".join(repr(key.key) for key in keys[:3])
    return f"key {names}" if len(keys) == 1 else f"{len(keys)} keys ({names}{', ...' if len(keys) > 3 else ''})"
