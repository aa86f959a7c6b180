"""Does a saved file fit the store that loads it? One set of rules for local and distributed stores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from kvstore.checkpoint import Checkpoint
from kvstore.compression.encoder import KeyEncoder
from kvstore.dtypes import DType, NDArray, accumulator
from kvstore.errors import CheckpointError, ConfigError, KVStoreError
from kvstore.messages import Key
from kvstore.optimizer import Optimizer, OptimizerSpec, create_optimizer

Extent: TypeAlias = tuple[tuple[int, ...], DType]
"""Shape and element type of a key."""
Installed: TypeAlias = tuple[OptimizerSpec, Optimizer[Any]]
"""An optimizer as data, and the rule made from it."""


def optimizer_in(path: str, checkpoint: Checkpoint) -> Installed | None:
    """Return the optimizer that a file holds, None if it holds none.

    Raises:
        CheckpointError: it is none of those registered here, or its parameters are wrong.
    """
    if checkpoint.optimizer is None:
        return None
    try:
        spec = msgspec.convert(checkpoint.optimizer, OptimizerSpec)
        return spec, create_optimizer(spec)
    except (KVStoreError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{path} holds an optimizer that cannot be used here: {error}", path=path) from error


def check_values(path: str, checkpoint: Checkpoint, own: Mapping[Key, Extent]) -> None:
    """Compare saved values with a store's keys, which must be the same ones.

    Raises:
        CheckpointError: a key is missing on either side, or differs; `key` names it.
    """
    values = checkpoint.values
    for key in (*own, *values, *checkpoint.masters, *checkpoint.residuals):
        if key not in values or key not in own:
            where = "this store: call init for it first" if key in values else "the file"
            raise CheckpointError(f"{path}: key {key!r} is not in {where}", path=path, key=key)
    for key, value in values.items():
        shape, dtype = own[key]
        if (value.shape, value.dtype) != (shape, dtype):
            raise CheckpointError(
                f"{path}: key {key!r} has shape {value.shape} of {value.dtype.name} there, {shape} of {dtype.name} "
                f"here", path=path, key=key,
            )  # fmt: skip
        if key in checkpoint.masters and accumulator(dtype) == dtype:
            raise CheckpointError(f"{path}: key {key!r} of {dtype.name} has a master of its own", path=path, key=key)


def check_states(path: str, checkpoint: Checkpoint, own: Mapping[Key, Extent], optimizer: Installed | None) -> None:
    """Compare the saved optimizer state with the optimizer that will go on with it, and with a store's keys.

    Raises:
        ConfigError: no optimizer is set, and the file holds none.
        CheckpointError: it was saved by another optimizer, or does not fit its key.
    """
    saved_by = checkpoint.optimizer_name
    if saved_by is None and not checkpoint.state:
        return
    if optimizer is None:
        raise ConfigError(
            f"{path} holds the state of the optimizer {saved_by!r}, but no optimizer is set: call "
            f"set_optimizer({saved_by!r}, ...) first"
        )
    if saved_by != optimizer[0].name:
        raise CheckpointError(
            f"{path} holds the state of the optimizer {saved_by!r}, this store has {optimizer[0].name!r}: call "
            f"set_optimizer({saved_by!r}, ...) first", path=path,
        )  # fmt: skip
    updated = [key for key, step in checkpoint.steps.items() if step]
    for key in {**dict.fromkeys(updated), **checkpoint.state}:
        if key not in own:
            text = f"{path} holds optimizer state of key {key!r}, which is not initialised: init it first"
            raise CheckpointError(text, path=path, key=key)
        _check_state(path, key, checkpoint.state.get(key, {}), own[key], optimizer[1])


def _check_state(path: str, key: Key, state: Mapping[str, NDArray], own: Extent, rule: Optimizer[Any]) -> None:
    shape, dtype = own
    wide = accumulator(dtype)
    found = {name: (array.shape, array.dtype) for name, array in state.items()}
    expected = {name: ((math.prod(shape),), array.dtype) for name, array in rule.create_state(0, wide).items()}
    if found != expected:
        raise CheckpointError(
            f"{path}: the optimizer state {_described(found)} of key {key!r} does not fit it: {rule.spec.name!r} keeps "
            f"{_described(expected)}", path=path, key=key,
        )  # fmt: skip


def _described(arrays: Mapping[str, Extent]) -> str:
    texts = (f"{name} {shape} of {dtype.name}" for name, (shape, dtype) in sorted(arrays.items()))
    return f"[{', '.join(texts)}]"


def require_states(path: str, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a file that was saved without an optimizer."""
    if checkpoint.optimizer_name is None:
        raise CheckpointError(f"{path} holds no optimizer state: no optimizer was set when it was saved", path=path)


def fill_encoder(path: str, encoder: KeyEncoder, saved: Mapping[str, NDArray]) -> KeyEncoder:
    """Let a new encoder take up what `KeyEncoder.state` gave, and return it. Raises CheckpointError with the path."""
    try:
        encoder.load_state(saved)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}", path=path, key=encoder.key) from error
    return encoder
