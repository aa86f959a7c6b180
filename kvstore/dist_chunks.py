"""What the servers hold of a worker's keys, read into a `Checkpoint` and written back, chunk by chunk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from kvstore.checkpoint import Checkpoint
from kvstore.dist_key import DistKey
from kvstore.dist_link import Link
from kvstore.dist_requests import less, to_all_servers
from kvstore.dtypes import NDArray, as_bytes_view, from_bytes, named_dtype
from kvstore.machine import server_address
from kvstore.messages import AskStatus, Frame, Key, ReadState, SetOptimizer, State, Status, WriteState
from kvstore.operation import Answer, Request

WAVE = 16
"""Chunks read or written at once."""
PREFIX = "state:"
KEPT = "kept:"


class ChunkStates:
    """Requests about all chunks of one rank's keys. Errors are those of `Link.run`."""

    def __init__(self, link: Link, keys: Mapping[Key, DistKey], rank: int) -> None:
        self._link = link
        self._keys = keys
        self._rank = rank

    def optimizer(self) -> str | None:
        """The servers' optimizer as JSON."""
        found: list[Status] = []

        def build(number: int, left: float) -> AskStatus:
            return AskStatus(sequence=number)

        def answered(answer: Answer, frames: Sequence[Frame]) -> None:
            assert isinstance(answer, Status)
            found.append(answer)

        self._link.run("the servers' optimizer", [Request(server_address(0), build, answered=answered)])
        return found[0].optimizer

    def read(self, values: bool) -> Checkpoint:
        """Return optimizer state and steps of all keys; with `values` values and masters too."""
        checkpoint = Checkpoint()
        for key in self._keys.values():
            states = self._read_chunks(key, values)
            arrays = _joined(key, states)
            shape = key.template.shape
            if values:
                checkpoint.values[key.key] = arrays.pop("value").reshape(shape)
            if "master" in arrays:
                checkpoint.masters[key.key] = arrays.pop("master").reshape(shape)
            kept = {name: arrays.pop(name) for name in list(arrays) if name.startswith(KEPT)}
            if kept:
                checkpoint.codec[key.key] = kept
            if arrays:
                checkpoint.state[key.key] = {name.removeprefix(PREFIX): array for name, array in arrays.items()}
            checkpoint.steps[key.key] = max(state.step for state, _ in states)
        return checkpoint

    def write(self, checkpoint: Checkpoint) -> None:
        """Set steps and optimizer state (without any it starts afresh), and values where the checkpoint has some."""
        for key in self._keys.values():
            requests = (self._write_request(key, chunk, checkpoint) for chunk in key.chunks)
            self._in_waves(f"writing the state of key {key.key!r}", requests)

    def install(self, spec: str) -> None:
        """Give the servers an optimizer, as JSON."""

        def build(number: int, left: float) -> SetOptimizer:
            return SetOptimizer(sequence=number, rank=0, turn=0, spec=spec, timeout=less(left))

        servers = max((key.num_servers for key in self._keys.values()), default=0)
        self._link.run("load of the optimizer", to_all_servers(servers, build))

    def _read_chunks(self, key: DistKey, values: bool) -> list[tuple[State, Sequence[Frame]]]:
        found: dict[int, tuple[State, Sequence[Frame]]] = {}

        def answered(answer: Answer, frames: Sequence[Frame]) -> None:
            assert isinstance(answer, State)
            found[answer.chunk] = (answer, frames)

        requests = (self._read_request(key, chunk, values, answered) for chunk in key.chunks)
        self._in_waves(f"reading the state of key {key.key!r}", requests)
        return [found[chunk] for chunk in key.chunks]

    def _read_request(
        self, key: DistKey, chunk: int, values: bool, answered: Callable[[Answer, Sequence[Frame]], None]
    ) -> Request:
        def build(number: int, left: float) -> ReadState:
            return ReadState(sequence=number, rank=self._rank, key=key.key, chunk=chunk, values=values)

        return Request(server_address(key.server(chunk)), build, answered=answered)

    def _write_request(self, key: DistKey, chunk: int, checkpoint: Checkpoint) -> Request:
        part = key.part(chunk)
        arrays: dict[str, NDArray] = {}
        for name, kept in (("value", checkpoint.values), ("master", checkpoint.masters)):
            if key.key in kept:
                arrays[name] = kept[key.key].reshape(-1)[part]
        for name, array in checkpoint.codec.get(key.key, {}).items():
            if name.startswith(KEPT):
                arrays[name] = array[part]
        for name, array in checkpoint.state.get(key.key, {}).items():
            arrays[PREFIX + name] = array[part]
        frames = [as_bytes_view(np.ascontiguousarray(array)) for array in arrays.values()]
        dtypes = [array.dtype.name for array in arrays.values()]

        def build(number: int, left: float) -> WriteState:
            return WriteState(
                sequence=number, rank=self._rank, key=key.key, chunk=chunk, names=list(arrays), dtypes=dtypes,
                step=checkpoint.steps.get(key.key, 0),
            )  # fmt: skip

        return Request(server_address(key.server(chunk)), build, frames)

    def _in_waves(self, what: str, requests: Iterable[Request]) -> None:
        source = iter(requests)
        while wave := list(itertools.islice(source, WAVE)):
            self._link.run(what, wave)


def _joined(key: DistKey, states: Sequence[tuple[State, Sequence[Frame]]]) -> dict[str, NDArray]:
    """Arrays by name, chunks one after another; what a chunk has not been updated with yet is zero, as it starts."""
    dtypes = {
        name: named_dtype(dtype, key.key)
        for state, _ in states
        for name, dtype in zip(state.names, state.dtypes, strict=True)
    }
    joined = {name: np.zeros(key.elements, dtype) for name, dtype in dtypes.items()}
    for state, frames in states:
        for name, frame in zip(state.names, frames, strict=True):
            joined[name][key.part(state.chunk)] = from_bytes(frame, dtypes[name])
    return joined
