"""`save` and `load` of a distributed store: state of all chunks from the servers into one file, and back.

The file knows nothing of chunks and servers, so it fits any number of them. Residuals belong to workers: rank N keeps
its own beside the file, as PATH.rankN.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvstore.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from kvstore.dist_key import DistKey
from kvstore.dist_link import Link
from kvstore.dist_requests import less, to_all_servers
from kvstore.dtypes import NDArray, accumulator, as_bytes_view, from_bytes, named_dtype
from kvstore.errors import CheckpointError, ConfigError, KVStoreError, MismatchError
from kvstore.machine import server_address
from kvstore.messages import Frame, Key, ReadState, SetOptimizer, State, WriteState
from kvstore.optimizer import create_optimizer, spec_from_json, spec_to_json
from kvstore.session import Answer, Request

WAVE = 16
"""Chunks read or written at once."""
PREFIX = "state:"


class DistState:
    """One rank's part in a save or load. `agree(topic, text)` raises where the ranks' texts differ."""

    def __init__(
        self, link: Link, keys: Mapping[Key, DistKey], rank: int, writer: int, agree: Callable[[str, str], None]
    ) -> None:
        """`writer`: the rank that reads and writes the shared file."""
        self._link = link
        self._keys = keys
        self._rank = rank
        self._writer = writer
        self._agree = agree

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything."""
        if self._rank == self._writer:
            checkpoint = self._read()
            checkpoint.extra["rounds"] = [[key.key, key.round] for key in self._keys.values()]
            write_checkpoint(path, checkpoint)
        residuals = {
            key.key: saved["residual"] for key in self._keys.values() if "residual" in (saved := key.encoder.state())
        }
        own = self._own_path(path)
        if residuals:
            write_checkpoint(own, Checkpoint(residuals=residuals))
        else:
            own.unlink(missing_ok=True)

    def save_optimizer(self, path: str | PathLike[str], dump_optimizer: bool) -> None:
        """Write the optimizer's state and steps; with `dump_optimizer` its specification too."""
        if self._rank != self._writer:
            return
        checkpoint = self._read()
        if checkpoint.optimizer is None:
            raise ConfigError("save_optimizer_states: no optimizer is set")
        optimizer = checkpoint.optimizer if dump_optimizer else None
        write_checkpoint(path, Checkpoint(optimizer=optimizer, state=checkpoint.state, steps=checkpoint.steps))

    def load(self, path: str | PathLike[str]) -> None:
        """Read everything; either all ranks take it up or none."""

        def prepare() -> tuple[Checkpoint | None, Checkpoint | None]:
            shared = read_checkpoint(path) if self._rank == self._writer else None
            if shared is not None:
                self._check_values(path, shared)
                self._check_state(path, shared)
            own = read_checkpoint(self._own_path(path)) if self._own_path(path).exists() else None
            for key, residual in (own.residuals if own else {}).items():
                if key not in self._keys or residual.size != self._keys[key].elements:
                    raise CheckpointError(f"{path}: the residual of key {key!r} does not fit", path=str(path), key=key)
            return shared, own

        shared, own = self._all_or_none(prepare)
        for key in self._keys.values():
            residual = own.residuals.get(key.key) if own else None
            key.encoder.load_state({} if residual is None else {"residual": residual})
        if shared is not None:
            self._write(shared)

    def load_optimizer(self, path: str | PathLike[str]) -> None:
        """Read the optimizer's state; either all ranks take it up or none."""

        def prepare() -> Checkpoint | None:
            if self._rank != self._writer:
                return None
            checkpoint = read_checkpoint(path)
            self._check_state(path, checkpoint)
            return checkpoint

        checkpoint = self._all_or_none(prepare)
        if checkpoint is not None:
            self._write(checkpoint)

    def _all_or_none(self, prepare: Callable[[], Any]) -> Any:
        try:
            prepared = prepare()
        except KVStoreError as error:
            try:
                self._agree("load", f"failed: {error}")
            except KVStoreError:
                raise error from None
            raise
        try:
            self._agree("load", "ok")
        except MismatchError as error:
            raise CheckpointError(f"not loaded, nothing was changed: {error}") from error
        return prepared

    def _own_path(self, path: str | PathLike[str]) -> Path:
        return Path(f"{os.fspath(path)}.rank{self._rank}")

    # --- reading --------------------------------------------------------------------------------------------------

    def _read(self) -> Checkpoint:
        checkpoint = Checkpoint()
        for key in self._keys.values():
            states = self._read_chunks(key)
            arrays = _joined(states)
            shape = key.template.shape
            checkpoint.values[key.key] = arrays.pop("value").reshape(shape)
            if "master" in arrays:
                checkpoint.masters[key.key] = arrays.pop("master").reshape(shape)
            if arrays:
                checkpoint.state[key.key] = {name.removeprefix(PREFIX): array for name, array in arrays.items()}
            checkpoint.steps[key.key] = max(state.step for state, _ in states)
            if states[0][0].optimizer is not None:
                checkpoint.optimizer = msgspec.json.decode(states[0][0].optimizer)
        return checkpoint

    def _read_chunks(self, key: DistKey) -> list[tuple[State, Sequence[Frame]]]:
        found: dict[int, tuple[State, Sequence[Frame]]] = {}

        def answered(answer: Answer, frames: Sequence[Frame]) -> None:
            assert isinstance(answer, State)
            found[answer.chunk] = (answer, frames)

        requests = (self._read_request(key, chunk, answered) for chunk in key.chunks)
        self._in_waves(f"reading the state of key {key.key!r}", requests)
        return [found[chunk] for chunk in key.chunks]

    def _read_request(self, key: DistKey, chunk: int, answered: Callable[[Answer, Sequence[Frame]], None]) -> Request:
        def build(number: int, left: float) -> ReadState:
            return ReadState(sequence=number, rank=self._rank, key=key.key, chunk=chunk)

        return Request(server_address(key.server(chunk)), build, answered=answered)

    def _in_waves(self, what: str, requests: Iterable[Request]) -> None:
        source = iter(requests)
        while wave := list(itertools.islice(source, WAVE)):
            self._link.run(what, wave)

    # --- writing --------------------------------------------------------------------------------------------------

    def _write(self, checkpoint: Checkpoint) -> None:
        if checkpoint.optimizer is not None:
            self._install(spec_to_json(spec_from_json(msgspec.json.encode(checkpoint.optimizer))))
        for key in self._keys.values():
            requests = (self._write_request(key, chunk, checkpoint) for chunk in key.chunks)
            self._in_waves(f"writing the state of key {key.key!r}", requests)

    def _install(self, spec: str) -> None:
        servers = next(iter(self._keys.values())).num_servers if self._keys else 0

        def build(number: int, left: float) -> SetOptimizer:
            return SetOptimizer(sequence=number, rank=0, turn=0, spec=spec, timeout=less(left))

        self._link.run("load", to_all_servers(servers, build))

    def _write_request(self, key: DistKey, chunk: int, checkpoint: Checkpoint) -> Request:
        part = key.part(chunk)
        arrays: dict[str, NDArray] = {}
        for name, kept in (("value", checkpoint.values), ("master", checkpoint.masters)):
            if key.key in kept:
                arrays[name] = kept[key.key].reshape(-1)[part]
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

    # --- checks ---------------------------------------------------------------------------------------------------

    def _check_values(self, path: str | PathLike[str], checkpoint: Checkpoint) -> None:
        for key in (*self._keys, *checkpoint.values):
            if key not in checkpoint.values or key not in self._keys:
                where = "the file" if key in self._keys else "this store (call init for it first)"
                raise CheckpointError(f"{path}: key {key!r} is not in {where}", path=str(path), key=key)
        for key, value in checkpoint.values.items():
            own = self._keys[key].template
            if (value.shape, value.dtype) != (own.shape, own.dtype):
                raise CheckpointError(
                    f"{path}: key {key!r} has shape {value.shape} and dtype {value.dtype.name} in the file, "
                    f"{own.shape} and {own.dtype.name} here", path=str(path), key=key,
                )  # fmt: skip

    def _check_state(self, path: str | PathLike[str], checkpoint: Checkpoint) -> None:
        spec = msgspec.json.encode(checkpoint.optimizer).decode() if checkpoint.optimizer is not None else self._spec()
        if spec is None and not checkpoint.state:
            return
        if spec is None:
            raise ConfigError(
                f"{path}: optimizer state, but no optimizer is set and the file holds none; call set_optimizer"
            )
        optimizer = create_optimizer(spec_from_json(spec))
        for key, state in checkpoint.state.items():
            if key not in self._keys:
                raise CheckpointError(f"{path}: key {key!r} is not in this store (call init first)", path=str(path))
            wide = accumulator(self._keys[key].dtype)
            names = optimizer.create_state(0, wide).keys()
            if not set(state) <= set(names) or any(array.size != self._keys[key].elements for array in state.values()):
                raise CheckpointError(
                    f"{path}: the optimizer state {sorted(state)} of key {key!r} does not fit {optimizer.spec.name!r} "
                    f"with {sorted(names)}", path=str(path), key=key,
                )  # fmt: skip

    def _spec(self) -> str | None:
        key = next(iter(self._keys.values()), None)
        return None if key is None else self._read_chunks(key)[0][0].optimizer


def _joined(states: Sequence[tuple[State, Sequence[Frame]]]) -> dict[str, NDArray]:
    """Arrays by name, chunks one after another; what a chunk has not been updated with yet is zero, as it starts."""
    names: dict[str, NDArray] = {}
    for state, _ in states:
        for name, dtype in zip(state.names, state.dtypes, strict=True):
            names.setdefault(name, np.empty(0, named_dtype(dtype, state.key)))
    return {
        name: np.concatenate([_part(state, frames, name, empty) for state, frames in states])
        for name, empty in names.items()
    }


def _part(state: State, frames: Sequence[Frame], name: str, empty: NDArray) -> NDArray:
    if name in state.names:
        return from_bytes(frames[state.names.index(name)], empty.dtype)
    size = from_bytes(frames[state.names.index("value")], named_dtype(state.dtypes[0], state.key)).size
    return np.zeros(size, empty.dtype)
