"""`save` and `load` of a distributed store: state of all chunks from the servers into one file, and back.

The file PATH knows nothing of chunks and servers, so it fits any number of them. Residuals belong to workers: rank N
keeps its own beside it, as PATH.rankN, with its own count of rounds. Both carry the same `save`, so what another save
left there is recognised and left alone. PATH lies where every rank can read it: the lowest live rank writes it, rank 0
loads it, and the others read its header, for `save` and for the rounds of ranks without a file of their own.

Each step ends with an agreement about its outcome, so that an error on one rank is an error on all, at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path

import msgspec

from kvstore.checkpoint import Checkpoint, Header, new_save, read_checkpoint, read_header, write_checkpoint
from kvstore.checkpoint_fit import Extent, check_states, check_values, fill_encoder, optimizer_in, require_states
from kvstore.compression.encoder import KeyEncoder
from kvstore.dist_chunks import ChunkStates
from kvstore.dist_codec_state import check_increments, encoder_states, increments_in, own_checkpoint
from kvstore.dist_key import DistKey
from kvstore.dist_link import Link
from kvstore.dtypes import NDArray
from kvstore.errors import CheckpointError, ConfigError, KVStoreError, MismatchError, PeerLeftError, PeerLostError
from kvstore.messages import Key
from kvstore.optimizer import create_optimizer, spec_from_json, spec_to_json

log = logging.getLogger("kvstore")


class DistState:
    """One rank's part in a save or load. `agree(topic, text)` raises where the ranks' texts differ."""

    def __init__(
        self,
        link: Link,
        keys: Mapping[Key, DistKey],
        rank: int,
        writer: int,
        agree: Callable[[str, str], None],
        num_workers: int = 1,
    ) -> None:
        """`writer`: the rank that reads and writes the shared file."""
        self._chunks = ChunkStates(link, keys, rank)
        self._keys = keys
        self._rank = rank
        self._writes = rank == writer
        self._agree = agree
        self._num_workers = num_workers

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything. With a rank gone, what is left is saved, but of the residuals only the writer's.

        Raises:
            CheckpointError: a file cannot be written, by this rank or another.
        """
        name = os.fspath(path)
        together = self._save_shared(name, self._everything)
        failure = _failure(lambda: self._save_own(name, keep=together or self._writes))
        if together:
            self._settle("residuals saved", failure, f"{name} was saved, but not all residuals were")
        elif failure is not None:
            raise failure

    def save_optimizer(self, path: str | PathLike[str], dump_optimizer: bool) -> None:
        """Write the optimizer's name, state and steps; with `dump_optimizer` its specification too.

        Raises:
            ConfigError: no optimizer is set. CheckpointError: the file cannot be written, by this rank or another.
        """

        def states() -> Checkpoint:
            checkpoint = self._read(values=False)
            if checkpoint.optimizer is None:
                raise ConfigError("save_optimizer_states: no optimizer is set; call set_optimizer first")
            checkpoint.optimizer = checkpoint.optimizer if dump_optimizer else None
            return checkpoint

        self._save_shared(os.fspath(path), states)

    def load(self, path: str | PathLike[str]) -> None:
        """Read everything; either all ranks take it up or none.

        Raises:
            CheckpointError: a file cannot be read or does not fit, here or on another rank; nothing is changed. Or
            writing to the servers failed on another rank; the text says which.
        """
        name = os.fspath(path)
        encoders: dict[Key, KeyEncoder] = {}

        def check(checkpoint: Checkpoint) -> Checkpoint:
            check_values(name, checkpoint, self._extents())
            return checkpoint

        def own(header: Header, shared: Checkpoint | None) -> str:
            mine = self._own_file(name, header.save)
            states = encoder_states(mine, self._keys, name)
            if shared is not None:
                check_increments(shared, states, self._num_workers, name)
            encoders.update(self._own_encoders(name, header.rounds | mine.rounds, states))
            return increments_in(states)

        self._load(name, check, own)
        for key, encoder in encoders.items():
            self._keys[key].encoder = encoder

    def load_optimizer(self, path: str | PathLike[str]) -> None:
        """Read the optimizer's state and nothing else of the file; either all ranks take it up or none.

        Raises:
            ConfigError: no optimizer is set, and the file holds none. CheckpointError: as `load`.
        """
        name = os.fspath(path)

        def states(read: Checkpoint) -> Checkpoint:
            require_states(name, read)
            return Checkpoint(
                optimizer=read.optimizer, optimizer_name=read.optimizer_name, state=read.state, steps=read.steps
            )

        self._load(name, states, lambda header, shared: "")

    # --- saving ---------------------------------------------------------------------------------------------------

    def _read(self, values: bool) -> Checkpoint:
        checkpoint = self._chunks.read(values)
        optimizer = self._chunks.optimizer()
        if optimizer is not None:
            checkpoint.optimizer = msgspec.json.decode(optimizer)
            checkpoint.optimizer_name = spec_from_json(optimizer).name
        return checkpoint

    def _everything(self) -> Checkpoint:
        checkpoint = self._read(values=True)
        checkpoint.save, checkpoint.rounds = new_save(), self._rounds()
        if checkpoint.codec:  # sums of increments, which are nothing without those of all workers
            checkpoint.extra["workers"] = self._num_workers
        return checkpoint

    def _save_shared(self, path: str, make: Callable[[], Checkpoint]) -> bool:
        """Let the writer write; True: every rank knows that it has, False: a rank is gone."""

        def write() -> None:
            if self._writes:
                write_checkpoint(path, make())

        failure = _failure(write)
        try:
            self._settle("save", failure, f"{path} was not saved")
        except (PeerLostError, PeerLeftError):
            if failure is not None:
                raise
            return False
        return True

    def _save_own(self, path: str, keep: bool) -> None:
        """Write this rank's file, or remove an older one."""
        mine, own = own_checkpoint(self._keys.values()), self._own_path(path)
        if (mine.residuals or mine.codec) and keep:
            mine.rounds, mine.save = self._rounds(), read_header(path).save
            write_checkpoint(own, mine)
            return
        try:
            own.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{own}, of an earlier save, cannot be removed: {error}", path=str(own)) from error

    def _rounds(self) -> dict[Key, int]:
        return {key.key: key.round + key.encoder.earlier for key in self._keys.values()}

    # --- loading --------------------------------------------------------------------------------------------------

    def _load(
        self,
        path: str,
        take: Callable[[Checkpoint], Checkpoint],
        own: Callable[[Header, Checkpoint | None], str],
    ) -> None:
        """Read on every rank, agree that all could, write, agree about that. `take` checks what rank 0 has read.

        `own` reads this rank's file; what it returns must be alike on all ranks. It is given what rank 0 has read.
        """
        shared: list[Checkpoint] = []
        digest = ""

        def read() -> None:
            nonlocal digest
            if self._writes:
                shared.append(take(read_checkpoint(path)))
                self._check_states(path, shared[0])
            header = read_header(path)
            digest = header.digest + own(header, shared[0] if shared else None)

        def write() -> None:
            for checkpoint in shared:
                self._write(checkpoint)

        failure = _failure(read)
        self._settle("load", failure, f"{path} was not loaded, nothing was changed", f"the file with digest {digest}")
        failure = _failure(write)
        self._settle("loaded", failure, f"{path}: the servers may hold parts of it now, load or broadcast again")

    def _extents(self) -> dict[Key, Extent]:
        return {key.key: (key.template.shape, key.dtype) for key in self._keys.values()}

    def _check_states(self, path: str, checkpoint: Checkpoint) -> None:
        installed = optimizer_in(path, checkpoint)
        if installed is None and checkpoint.optimizer_name is not None and (here := self._chunks.optimizer()):
            spec = spec_from_json(here)
            installed = spec, create_optimizer(spec)
        check_states(path, checkpoint, self._extents(), installed)
        spread = [key.key for key in self._keys.values() if not key.whole and len(key.chunks) > 1]
        if checkpoint.optimizer is not None and installed is not None and installed[1].whole and spread:
            raise CheckpointError(
                f"{path}: its optimizer {installed[0].name!r} needs each array whole, but key {spread[0]!r} is spread "
                f"over servers in chunks: call set_optimizer before init", path=path, key=spread[0],
            )  # fmt: skip

    def _write(self, checkpoint: Checkpoint) -> None:
        if checkpoint.optimizer is not None:
            self._chunks.install(spec_to_json(spec_from_json(msgspec.json.encode(checkpoint.optimizer))))
        self._chunks.write(checkpoint)

    def _own_encoders(
        self, path: str, rounds: Mapping[Key, int], states: Mapping[Key, Mapping[str, NDArray]]
    ) -> dict[Key, KeyEncoder]:
        """New encoders with what this rank left unsent, what its codecs keep, and the number of its pushes."""
        encoders = {}
        for key in self._keys.values():
            saved = states.get(key.key, {})
            encoder = encoders[key.key] = fill_encoder(str(self._own_path(path)), key.new_encoder(), saved)
            encoder.earlier = rounds.get(key.key, 0) - key.round
        return encoders

    def _own_file(self, path: str, save: str) -> Checkpoint:
        own = self._own_path(path)
        try:
            exists = own.exists()
        except OSError as error:
            raise CheckpointError(f"{own} cannot be read: {error}", path=str(own)) from error
        if not exists:
            return Checkpoint()
        if read_header(own).save != save:
            log.warning("%s belongs to another save than %s and is left alone: nothing unsent is restored", own, path)
            return Checkpoint()
        return read_checkpoint(own)

    # --- both -----------------------------------------------------------------------------------------------------

    def _own_path(self, path: str) -> Path:
        return Path(f"{path}.rank{self._rank}")

    def _settle(self, topic: str, failure: Exception | None, otherwise: str, text: str = "ok") -> None:
        """Tell all ranks how this one fared. Raises `failure`, else CheckpointError where another rank failed."""
        try:
            self._agree(topic, text if failure is None else f"failed: {failure}")
        except KVStoreError as error:
            if failure is not None:
                raise failure from None
            if isinstance(error, MismatchError):
                raise CheckpointError(f"{otherwise}: {error}") from error
            raise
        if failure is not None:
            raise failure


def _failure(act: Callable[[], object]) -> Exception | None:
    """Do something, and return what it raised: other ranks have to hear of it first."""
    try:
        act()
    except Exception as error:
        return error
    return None
