"""Requests of a distributed store other than push and pull, as parts of operations. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.dist_key import DistKey
from kvstore.dtypes import NDArray, as_bytes_view
from kvstore.errors import KVStoreError, to_wire
from kvstore.lane import MAX_ENTRIES
from kvstore.machine import SCHEDULER, server_address
from kvstore.messages import (
    Agree,
    Assign,
    AssignEntry,
    Barrier,
    Declare,
    Declared,
    DeclareEntry,
    Failure,
    Frame,
    Key,
    Message,
    Refuse,
)
from kvstore.operation import Answer, Request
from kvstore.wire import frame_bytes


def assignments(
    keys: Sequence[tuple[DistKey, NDArray]], sync: bool, average: bool, message_bytes: int
) -> Iterator[Request]:
    """Rank 0's values of keys, flat, to the servers: messages of up to `message_bytes`, or `MAX_ENTRIES` chunks."""
    batches: dict[int, _Batch] = {}
    for key, flat in keys:
        for chunk in key.chunks:
            entry = AssignEntry(
                key.key, chunk, key.template.shape, key.dtype.name, key.epoch, key.round, sync, average, key.whole,
                key.staleness, key.on_stale,
            )  # fmt: skip
            frame = as_bytes_view(flat[key.part(chunk)])
            server, size = key.server(chunk), frame_bytes(frame)
            batch = batches.setdefault(server, _Batch())
            full = batch.size + size > message_bytes or len(batch.entries) == MAX_ENTRIES
            if batch.entries and full:
                yield _assign(server, batch.entries, batch.frames, key.rank)
                batch = batches[server] = _Batch()
            batch.entries.append(entry)
            batch.frames.append(frame)
            batch.size += size
    for server, batch in batches.items():
        yield _assign(server, batch.entries, batch.frames, keys[0][0].rank)


@dataclass
class _Batch:
    entries: list[AssignEntry] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    size: int = 0


def declarations(
    keys: Iterable[tuple[DistKey, int]], sync: bool, average: bool, learn: Callable[[Key, bool], None]
) -> list[Request]:
    """This rank's view of keys to the servers given beside them; `learn(key, whole)` hears how a key is placed."""
    return [_declare(server, group, sync, average, learn) for server, group in _by_server(keys)]


def refusals(keys: Iterable[DistKey], error: KVStoreError) -> list[Request]:
    """Tell the servers that this rank does not push these keys in their next rounds, and why."""
    failure = Failure(*to_wire(error))
    placed = ((key, server) for key in keys for server in key.servers)
    return [_refuse(server, group, failure) for server, group in _by_server(placed)]


def _by_server(placed: Iterable[tuple[DistKey, int]]) -> Iterator[tuple[int, list[DistKey]]]:
    """Groups for one message each: keys of one server, at most `MAX_ENTRIES`."""
    by_server: dict[int, list[DistKey]] = {}
    for key, server in placed:
        by_server.setdefault(server, []).append(key)
    for server, keys in by_server.items():
        for start in range(0, len(keys), MAX_ENTRIES):
            yield server, keys[start : start + MAX_ENTRIES]


def to_all_servers(num_servers: int, build: Callable[[int, float], Message]) -> list[Request]:
    """The same message to every server."""
    return [Request(server_address(server), build) for server in range(num_servers)]


def barrier(rank: int, turn: int) -> Request:
    """This rank's `turn`-th barrier."""
    return Request(SCHEDULER, lambda number, left: Barrier(sequence=number, rank=rank, turn=turn, timeout=less(left)))


def agreement(rank: int, topic: str, turn: int, value: str) -> Request:
    """This rank's `turn`-th value for `topic`, which all ranks must give alike."""
    return Request(
        SCHEDULER,
        lambda number, left: Agree(sequence=number, rank=rank, topic=topic, turn=turn, value=value, timeout=less(left)),
    )


def _assign(server: int, entries: list[AssignEntry], frames: list[Frame], rank: int) -> Request:
    def build(number: int, left: float) -> Assign:
        return Assign(sequence=number, rank=rank, entries=entries, timeout=less(left))

    return Request(server_address(server), build, frames)


def _declare(
    server: int, keys: list[DistKey], sync: bool, average: bool, learn: Callable[[Key, bool], None]
) -> Request:
    entries = [
        DeclareEntry(
            key.key,
            key.template.shape,
            key.dtype.name,
            key.epoch,
            sync,
            average,
            key.round,
            key.staleness,
            key.on_stale,
        )
        for key in keys
    ]

    def build(number: int, left: float) -> Declare:
        return Declare(sequence=number, rank=keys[0].rank, entries=entries, timeout=less(left))

    def answered(answer: Answer, frames: Sequence[Frame]) -> None:
        assert isinstance(answer, Declared)
        for key, whole in zip(keys, answer.whole, strict=True):
            learn(key.key, whole)

    return Request(server_address(server), build, answered=answered)


def _refuse(server: int, keys: list[DistKey], failure: Failure) -> Request:
    rounds = [(key.key, key.round + 1) for key in keys]
    rank = keys[0].rank
    return Request(
        server_address(server),
        lambda number, left: Refuse(sequence=number, rank=rank, rounds=rounds, failure=failure),
    )


def less(left: float) -> float:
    """The receiver's share of the time left: its answer names who is missing, our own deadline could not."""
    return left * 0.9
