"""A local store's keys to and from the file of `save`. Reading checks everything before it changes anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np

from kvstore.arrays import Template
from kvstore.checkpoint import Checkpoint
from kvstore.compression.encoder import KeyEncoder
from kvstore.dtypes import NDArray, accumulator
from kvstore.errors import CheckpointError, KVStoreError, ParameterError
from kvstore.keys import keys_of
from kvstore.local_key import LocalKey
from kvstore.messages import Count, Key
from kvstore.optimizer import Optimizer, OptimizerSpec, create_optimizer
from kvstore.reduction import to_host

Installed: TypeAlias = tuple[OptimizerSpec, Optimizer[Any]]
"""An optimizer as data, and the rule made from it."""


def checkpoint_of(keys: Mapping[Key, LocalKey], spec: OptimizerSpec | None) -> Checkpoint:
    """Return everything that `save` keeps."""
    checkpoint = states_of(keys, spec, dump_optimizer=True)
    for key, local in keys.items():
        shape = local.template.shape
        checkpoint.values[key] = to_host(local.value()).reshape(shape)
        if accumulator(local.template.dtype) != local.template.dtype:
            checkpoint.masters[key] = to_host(local.master).reshape(shape)
        residual = _residual_of(local)
        if residual is not None:
            checkpoint.residuals[key] = residual
    checkpoint.extra["pushes"] = [[key, local.counters.pushes] for key, local in keys.items()]
    return checkpoint


def states_of(keys: Mapping[Key, LocalKey], spec: OptimizerSpec | None, dump_optimizer: bool) -> Checkpoint:
    """Return the optimizer's state and step numbers; with `dump_optimizer` its specification too."""
    checkpoint = Checkpoint(extra={"optimizer": None if spec is None else spec.name})
    if dump_optimizer and spec is not None:
        checkpoint.optimizer = msgspec.to_builtins(spec)
    for key, local in keys.items():
        if local.state is not None:
            checkpoint.steps[key] = local.step
            checkpoint.state[key] = dict(local.state)
    return checkpoint


def optimizer_in(checkpoint: Checkpoint, path: str) -> Installed | None:
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


def check_states(keys: Mapping[Key, LocalKey], checkpoint: Checkpoint, optimizer: Installed | None, path: str) -> None:
    """Compare the saved state with the optimizer and with the keys as they will be (values in the file, else here).

    Raises:
        CheckpointError: it was saved by another optimizer, or a state array does not fit its key.
    """
    if not checkpoint.state:
        return
    saved_by, here = checkpoint.extra.get("optimizer"), optimizer[0].name if optimizer else None
    if optimizer is None or saved_by != here:
        raise CheckpointError(
            f"{path} holds the state of the optimizer {saved_by!r}, this store has {here!r}: call "
            f"set_optimizer({saved_by!r}, ...) first",
            path=path,
        )
    for key, state in checkpoint.state.items():
        n, dtype = _extent(keys, checkpoint, key, path)
        expected = {name: (array.shape, array.dtype) for name, array in optimizer[1].create_state(n, dtype).items()}
        if {name: (array.shape, array.dtype) for name, array in state.items()} != expected:
            raise CheckpointError(f"{path}: the optimizer state of key {key!r} does not fit it", path=path, key=key)


def check_values(keys: Mapping[Key, LocalKey], checkpoint: Checkpoint, path: str) -> None:
    """Compare saved values with the keys that this store has already; others are new ones.

    Raises:
        CheckpointError: a shape or type differs, a key or push count is none, or a residual is not finite.
    """
    for key, value in checkpoint.values.items():
        local = keys.get(key)
        if local is not None and (value.shape, value.dtype) != (local.template.shape, local.template.dtype):
            raise CheckpointError(
                f"{path}: key {key!r} has shape {value.shape} of {value.dtype.name} there, {local.template.shape} of "
                f"{local.template.dtype.name} here",
                path=path, key=key,
            )  # fmt: skip
        residual = checkpoint.residuals.get(key)
        if residual is not None and not np.isfinite(residual).all():
            raise CheckpointError(f"{path}: the residual of key {key!r} is not finite", path=path, key=key)
    try:
        keys_of(list(checkpoint.values))
        _pushes(checkpoint)
    except (ParameterError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{path} holds wrong keys or push counts: {error}", path=path) from error


def restore_values(keys: dict[Key, LocalKey], checkpoint: Checkpoint) -> None:
    """Take up values, masters, residuals and push counts, after the checks."""
    pushes = _pushes(checkpoint)
    for key, value in checkpoint.values.items():
        if key in keys:
            keys[key].overwrite(value, keys[key].template)
        else:
            keys[key] = LocalKey(key, value, Template(value.shape, value.dtype))
        local = keys[key]
        if key in checkpoint.masters and accumulator(value.dtype) != value.dtype:
            local.master = checkpoint.masters[key].reshape(-1)
        local.counters.pushes = pushes.get(key, 0)
        if key in checkpoint.residuals and local.n:
            local.encoders = [_encoder(local, part) for part in checkpoint.residuals[key].reshape(-1, local.n)]


def restore_states(keys: Mapping[Key, LocalKey], checkpoint: Checkpoint) -> None:
    """Take up optimizer state, after the checks; keys without any start afresh."""
    for key, local in keys.items():
        local.forget_updates()
        if key in checkpoint.state:
            local.state, local.step = checkpoint.state[key], checkpoint.steps.get(key, 0)


def _pushes(checkpoint: Checkpoint) -> dict[Key, int]:
    counts = msgspec.convert(checkpoint.extra.get("pushes", []), list[tuple[int | str, Count]])
    return dict(counts)


def _extent(keys: Mapping[Key, LocalKey], checkpoint: Checkpoint, key: Key, path: str) -> tuple[int, np.dtype[Any]]:
    if key in checkpoint.values:
        value = checkpoint.values[key]
        return value.size, accumulator(value.dtype)
    if key not in keys:
        raise CheckpointError(f"{path} holds state of key {key!r}, which is not initialised: init it first", path=path)
    return keys[key].n, accumulator(keys[key].template.dtype)


def _residual_of(local: LocalKey) -> NDArray | None:
    """One key's residuals, flat float32, one position after another; None where nothing is unsent."""
    parts = [encoder.state().get("residual") for encoder in local.encoders]
    if all(part is None for part in parts):
        return None
    return np.concatenate([np.zeros(local.n, np.float32) if part is None else part for part in parts])


def _encoder(local: LocalKey, residual: NDArray) -> KeyEncoder:
    encoder = KeyEncoder(local.key, local.n, local.template.dtype)
    encoder.load_state({"residual": residual})
    return encoder
