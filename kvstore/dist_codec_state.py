"""What codecs keep at one rank, beside the shared checkpoint: residuals, momentum, states; out to its file and back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from os import PathLike

from kvstore.checkpoint import Checkpoint
from kvstore.compression.registry import codec_named
from kvstore.dist_chunks import KEPT
from kvstore.dist_key import DistKey
from kvstore.dtypes import NDArray
from kvstore.errors import CheckpointError, KVStoreError
from kvstore.messages import Key

States = dict[Key, dict[str, NDArray]]


def own_checkpoint(keys: Iterable[DistKey]) -> Checkpoint:
    """This rank's file; empty where nothing is kept."""
    checkpoint = Checkpoint()
    for key in keys:
        state = key.encoder.state()
        if "residual" in state:
            checkpoint.residuals[key.key] = state.pop("residual")
        if state:
            checkpoint.codec[key.key] = state
    return checkpoint


def encoder_states(own: Checkpoint, keys: Mapping[Key, DistKey], path: str | PathLike[str]) -> States:
    """What each key's encoder is to load.

    Raises:
        CheckpointError: a key is not in this store.
    """
    states: States = {key: dict(parts) for key, parts in own.codec.items()}
    for key, residual in own.residuals.items():
        states.setdefault(key, {})["residual"] = residual
    for key in states:
        if key not in keys:
            text = f"{os.fspath(path)}: what is kept of key {key!r} belongs to no key here: call init first"
            raise CheckpointError(text, path=os.fspath(path), key=key)
    return states


def increments_in(states: States) -> str:
    """For comparison between ranks: the keys whose codec accumulates; empty text if there are none."""
    keys = sorted(repr(key) for key, state in states.items() if any(_accumulates(part) for part in state))
    return f", with increments of {', '.join(keys)}" if keys else ""


def check_increments(shared: Checkpoint, states: States, workers: int, path: str | PathLike[str]) -> None:
    """Raise CheckpointError where the servers' sum of increments was saved, but not all ranks' parts of it are here."""
    name = os.fspath(path)
    if any(_kept(parts) for parts in shared.codec.values()) and shared.extra.get("workers") != workers:
        raise CheckpointError(
            f"{name} holds sums of increments of {shared.extra.get('workers')} workers, this job has {workers}: "
            f"load it with as many workers",
            path=name,
        )
    for key, parts in shared.codec.items():
        kept, value = _kept(parts), shared.values[key]
        if not kept:
            continue
        if any(array.shape != (value.size,) for array in kept.values()):
            raise CheckpointError(f"{name}: the sum of increments of key {key!r} does not fit it", path=name, key=key)
        if not any(_accumulates(part) for part in states.get(key, {})):
            raise CheckpointError(
                f"{name} holds the servers' sum of increments of key {key!r}, but the file of this rank holds no "
                f"state of the codec: keep the files PATH.rankN together",
                path=name, key=key,
            )  # fmt: skip


def _kept(parts: Mapping[str, NDArray]) -> dict[str, NDArray]:
    return {name: array for name, array in parts.items() if name.startswith(KEPT)}  # others are a local store's


def _accumulates(part: str) -> bool:
    if not part.startswith("state/"):
        return False
    try:
        return codec_named(part.split("/")[1]).accumulates
    except KVStoreError:
        return False
