"""A local store's keys to and from the file of `save`. Reading checks everything before it changes anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec
import numpy as np

from kvstore.arrays import Template
from kvstore.checkpoint import Checkpoint, new_save
from kvstore.checkpoint_fit import Extent, fill_encoder
from kvstore.compression.encoder import KeyEncoder
from kvstore.dtypes import NDArray, accumulator
from kvstore.errors import CheckpointError, ParameterError
from kvstore.keys import keys_of
from kvstore.local_key import Kept, LocalKey
from kvstore.messages import Key
from kvstore.optimizer import OptimizerSpec
from kvstore.reduction import to_host

Encoders: TypeAlias = dict[Key, tuple[list[KeyEncoder], Kept | None]]
"""Of each key: one encoder per position in its list of arrays, where something is kept, and the sum of increments."""
MOST_POSITIONS = 4096
"""Arrays of one key in one push."""


def checkpoint_of(keys: Mapping[Key, LocalKey], spec: OptimizerSpec | None) -> Checkpoint:
    """Return everything that `save` keeps."""
    checkpoint = states_of(keys, spec, dump_optimizer=True)
    checkpoint.save = new_save()
    for key, local in keys.items():
        shape = local.template.shape
        checkpoint.values[key] = to_host(local.value()).reshape(shape)
        if accumulator(local.template.dtype) != local.template.dtype:
            checkpoint.masters[key] = to_host(local.master).reshape(shape)
        residual = _residual_of(local)
        if residual is not None:
            checkpoint.residuals[key] = residual
        codec = _codec_state(local)
        if codec:
            checkpoint.codec[key] = codec
        checkpoint.rounds[key] = local.counters.pushes
    return checkpoint


def states_of(keys: Mapping[Key, LocalKey], spec: OptimizerSpec | None, dump_optimizer: bool) -> Checkpoint:
    """Return the optimizer's name, state and step numbers; with `dump_optimizer` its specification too."""
    checkpoint = Checkpoint(optimizer_name=None if spec is None else spec.name)
    if dump_optimizer and spec is not None:
        checkpoint.optimizer = msgspec.to_builtins(spec)
    for key, local in keys.items() if spec is not None else ():
        checkpoint.steps[key] = local.step
        if local.state is not None:
            checkpoint.state[key] = dict(local.state)
    return checkpoint


def extents(keys: Mapping[Key, LocalKey]) -> dict[Key, Extent]:
    """Return shape and element type of each key."""
    return {key: (local.template.shape, local.template.dtype) for key, local in keys.items()}


def new_extents(checkpoint: Checkpoint, path: str) -> dict[Key, Extent]:
    """Return shape and element type of the file's keys, which a local store makes where it lacks them.

    Raises:
        CheckpointError: one of them cannot be a key.
    """
    try:
        keys_of(list(checkpoint.values))
    except ParameterError as error:
        raise CheckpointError(f"{path} holds wrong keys: {error}", path=path) from error
    return {key: (value.shape, value.dtype) for key, value in checkpoint.values.items()}


def encoders_in(checkpoint: Checkpoint, path: str) -> Encoders:
    """Return new encoders that hold the file's residuals and what codecs keep.

    Raises:
        CheckpointError: a part of it does not fit its key, or is not finite.
    """
    found: Encoders = {}
    for key in {**checkpoint.residuals, **checkpoint.codec}:
        value = checkpoint.values[key]
        positions, kept = _codec_parts(path, key, value.size, checkpoint)
        encoders = [KeyEncoder(key, value.size, value.dtype, shape=value.shape) for _ in positions]
        found[key] = (
            [fill_encoder(path, encoder, part) for encoder, part in zip(encoders, positions, strict=True)],
            kept,
        )
    return found


def restore_values(keys: dict[Key, LocalKey], checkpoint: Checkpoint, encoders: Encoders) -> None:
    """Take up values, masters, residuals and push counts, after the checks."""
    for key, value in checkpoint.values.items():
        if key in keys:
            keys[key].overwrite(value, keys[key].template)
        else:
            keys[key] = LocalKey(key, value, Template(value.shape, value.dtype))
        local = keys[key]
        if key in checkpoint.masters:
            local.master = checkpoint.masters[key].reshape(-1)
        local.counters.pushes = checkpoint.rounds.get(key, 0)
        local.encoders, local.kept = encoders.get(key, ([], None))


def restore_states(keys: Mapping[Key, LocalKey], checkpoint: Checkpoint) -> None:
    """Take up optimizer state, after the checks; keys without any start afresh."""
    for key, local in keys.items():
        local.state, local.step = checkpoint.state.get(key), checkpoint.steps.get(key, 0)


def _residual_of(local: LocalKey) -> NDArray | None:
    """One key's residuals, flat float32, one position after another; None where nothing is unsent."""
    parts = [encoder.state().get("residual") for encoder in local.encoders]
    if all(part is None for part in parts):
        return None
    return np.concatenate([np.zeros(local.n, np.float32) if part is None else part for part in parts])


def _codec_state(local: LocalKey) -> dict[str, NDArray]:
    """What codecs keep of one key beside the residuals: 'POSITION/NAME', and 'kept/POSITIONS'."""
    found = {} if local.kept is None else {f"kept/{local.kept.positions}": to_host(local.kept.total)}
    for position, encoder in enumerate(local.encoders):
        found |= {f"{position}/{name}": array for name, array in encoder.state().items() if name != "residual"}
    return found


def _codec_parts(path: str, key: Key, n: int, checkpoint: Checkpoint) -> tuple[list[dict[str, NDArray]], Kept | None]:
    """State for each position's encoder, and the sum of increments."""
    residual = checkpoint.residuals.get(key)
    positions = [] if residual is None or not n else [{"residual": part} for part in residual.reshape(-1, n)]
    kept = None
    for name, array in checkpoint.codec.get(key, {}).items():
        if name.startswith("kept:"):  # of a job's servers, which goes with the files of its ranks
            continue
        where, _, part = name.partition("/")
        number = part if where == "kept" else where
        if not (number.isdecimal() and int(number) <= MOST_POSITIONS):
            raise CheckpointError(f"{path}: key {key!r} has an unknown part {name!r} of a codec", path=path, key=key)
        if where == "kept":
            if array.shape != (n,):
                text = f"{path}: the sum of increments of key {key!r} has another size"
                raise CheckpointError(text, path=path, key=key)
            kept = Kept(array, int(number))
            continue
        positions += [{} for _ in range(len(positions), int(number) + 1)]
        positions[int(number)][part] = array
    return positions, kept
