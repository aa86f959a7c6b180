"""The stores of one process: 'local' sums a list of arrays per key on the host, 'device' where the first one lies.

On 'device', compression applies: every array of the list, the first too, is quantised with a residual of its own,
dequantised and then summed in list order, so no sample is favoured. An optimizer or updater computes on the host.
Not for use by several threads at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from typing import Any

from kvstore import checkpoint_fit, local_checkpoint
from kvstore.arrays import Template, check_writable, describe, host_view
from kvstore.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from kvstore.checkpoint_fit import Installed
from kvstore.compression.policy import CompressionPolicy
from kvstore.dtypes import NDArray, is_float
from kvstore.errors import (
    ArrayError,
    ClosedError,
    ConfigError,
    KeyExistsError,
    KeyNotInitializedError,
    NotSupportedError,
    ParameterError,
    UnknownNameError,
)
from kvstore.handle import Handle, done_at_once
from kvstore.keys import keys_of, mirrored, pair_outs, pair_values
from kvstore.local_key import Counters, LocalKey
from kvstore.messages import Key
from kvstore.optimizer import create_optimizer, make_spec, with_learning_rate
from kvstore.reduction import check_match
from kvstore.store import Array, Keys, KVStore, Updater, role_to_count

LOCAL, DEVICE = "local", "device"
Outs = Sequence[tuple[Key, list[Any]]]


class LocalStore(KVStore):
    """A KVStore within one process; rank 0 of 1 worker."""

    def __init__(self, kind: str = LOCAL, average: bool = False) -> None:
        """Args: `kind`: 'local' or 'device'. `average`: divide sums by the number of workers, which is 1 here."""
        if kind not in (LOCAL, DEVICE):
            raise UnknownNameError(f"no local store is called {kind!r}; there are 'local' and 'device'", name=kind)
        self._kind = kind
        self.average = average
        self._keys: dict[Key, LocalKey] = {}
        self._policy: CompressionPolicy | None = None
        self._optimizer: Installed | None = None
        self._updater: Updater | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<{self._kind} store: {len(self._keys)} keys{', closed' if self._closed else ''}>"

    @property
    def type(self) -> str:
        """'local' or 'device'."""
        return self._kind

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def num_workers(self) -> int:
        """Always 1."""
        return 1

    def num_dead_node(self, role: str | None = None, timeout: float | None = None) -> int:
        """Return 0: there is nobody else."""
        self._check_open("num_dead_node")
        role_to_count(role)
        return 0

    def is_capable(self, capability: str) -> bool:
        """See `KVStore.is_capable`."""
        offered = {"optimizer", "updater", "asynchronous"} | ({"compression"} if self._kind == DEVICE else set())
        return capability.lower() in offered

    # --- values ---------------------------------------------------------------------------------------------------

    def init(self, key: Keys, value: Array = None) -> None:
        """See `KVStore.init`."""
        pairs = self._single_values(key, value, "init")
        for one, _, _ in pairs:
            if one in self._keys:
                raise KeyExistsError(f"key {one!r} is already initialised; broadcast overwrites a value", key=one)
        for one, array, template in pairs:
            self._keys[one] = LocalKey(one, array, template)

    def push(self, key: Keys, value: Array = None, priority: int = 0) -> None:
        """See `KVStore.push`."""
        self._push(self._checked_values(key, value, "push"))

    def pull(self, key: Keys, out: Array = None, priority: int = 0) -> Any:
        """See `KVStore.pull`."""
        if out is None and isinstance(key, Mapping):
            out = key
        return self._pull(key, out, self._checked_outs(key, out, "pull"))

    def pushpull(self, key: Keys, value: Array = None, out: Array = None, priority: int = 0) -> Any:
        """See `KVStore.pushpull`."""
        pairs = self._checked_values(key, value, "pushpull")
        outs = self._checked_outs(key, out, "pushpull")
        self._push(pairs)
        return self._pull(key, out, outs)

    def broadcast(self, key: Keys, value: Array = None, out: Array = None, priority: int = 0) -> Any:
        """See `KVStore.broadcast`."""
        pairs = self._single_values(key, value, "broadcast")
        outs = pair_outs(key, out, "broadcast")
        self._check_outs(outs, {one: template for one, _, template in pairs}, "broadcast")
        for one, array, template in pairs:
            if one in self._keys:
                self._keys[one].overwrite(array, template)
            else:
                self._keys[one] = LocalKey(one, array, template)
        return self._pull(key, out, outs)

    def push_async(self, key: Keys, value: Array = None, priority: int = 0) -> Handle:
        """See `KVStore.push_async`; done at once here, as are the other two."""
        return done_at_once(f"push of {_named(key)}", lambda: self.push(key, value, priority))

    def pull_async(self, key: Keys, out: Array = None, priority: int = 0) -> Handle:
        """See `KVStore.pull_async`."""
        return done_at_once(f"pull of {_named(key)}", lambda: self.pull(key, out, priority))

    def pushpull_async(self, key: Keys, value: Array = None, out: Array = None, priority: int = 0) -> Handle:
        """See `KVStore.pushpull_async`."""
        return done_at_once(f"pushpull of {_named(key)}", lambda: self.pushpull(key, value, out, priority))

    # --- updates --------------------------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: Any, **params: Any) -> None:
        """See `KVStore.set_optimizer`. It takes the place of an updater."""
        self._check_open("set_optimizer")
        spec = make_spec(optimizer, **params)
        self._optimizer, self._updater = (spec, create_optimizer(spec)), None
        for local in self._keys.values():
            local.forget_updates()

    def set_learning_rate(
        self, learning_rate: float | None = None, multipliers: Mapping[str, float] | None = None
    ) -> None:
        """See `KVStore.set_learning_rate`."""
        self._check_open("set_learning_rate")
        spec = with_learning_rate(self._require_optimizer("set_learning_rate")[0], learning_rate, multipliers)
        self._optimizer = (spec, create_optimizer(spec))

    def set_updater(self, updater: Updater | None) -> None:
        """See `KVStore.set_updater`. It takes the place of an optimizer."""
        self._check_open("set_updater")
        if updater is not None and not callable(updater):
            raise ParameterError(
                f"set_updater needs a function (key, gradient, value), not a {type(updater).__name__}",
                parameter="updater", given=repr(updater), allowed="a function, or None",
            )  # fmt: skip
        self._optimizer, self._updater = None, updater

    # --- compression ----------------------------------------------------------------------------------------------

    def set_gradient_compression(
        self, params: Mapping[str, Any], per_key: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """See `KVStore.set_gradient_compression`."""
        self._check_compressing("set_gradient_compression")
        policy = CompressionPolicy.parse(params, per_key)
        for key, local in self._keys.items():
            policy.params_for(key, local.n, local.template.dtype)
        self._policy = policy

    def clear_gradient_compression(self, flush: bool = True) -> None:
        """See `KVStore.clear_gradient_compression`."""
        self._check_compressing("clear_gradient_compression")
        self._policy = None
        if not flush:
            for local in self._keys.values():
                local.encoders = []

    # --- the job --------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Return at once: there is nobody to wait for."""
        self._check_open("barrier")

    def stats(self) -> dict[str, Any]:
        """See `KVStore.stats`. `sent_bytes`: what was summed, encoded where it was; 'servers' is empty."""
        self._check_open("stats")
        keys = {key: asdict(local.counters) for key, local in self._keys.items()}
        total = {name: sum(one[name] for one in keys.values()) for name in asdict(Counters())}
        return {"keys": keys, "servers": {}, "total": total}

    def save(self, path: str | PathLike[str]) -> None:
        """See `KVStore.save`."""
        self._check_open("save")
        spec = None if self._optimizer is None else self._optimizer[0]
        write_checkpoint(path, local_checkpoint.checkpoint_of(self._keys, spec))

    def load(self, path: str | PathLike[str]) -> None:
        """See `KVStore.load`.

        Keys that the store lacks are created; those it has must be in the file, with the same shape and type. An
        optimizer in the file takes the place of this store's. Of a distributed job's file it takes up everything but
        the residuals, which the ranks keep beside it.
        """
        self._check_open("load")
        name = os.fspath(path)
        checkpoint = read_checkpoint(name)
        optimizer = checkpoint_fit.optimizer_in(name, checkpoint) or self._optimizer
        keys = local_checkpoint.new_extents(checkpoint, name) | local_checkpoint.extents(self._keys)
        checkpoint_fit.check_values(name, checkpoint, keys)
        checkpoint_fit.check_states(name, checkpoint, keys, optimizer)
        encoders = local_checkpoint.encoders_in(checkpoint, name)
        local_checkpoint.restore_values(self._keys, checkpoint, encoders)
        self._restore_optimizer(optimizer, checkpoint)

    def save_optimizer_states(self, path: str | PathLike[str], dump_optimizer: bool = False) -> None:
        """See `KVStore.save_optimizer_states`."""
        self._check_open("save_optimizer_states")
        spec, _ = self._require_optimizer("save_optimizer_states")
        write_checkpoint(path, local_checkpoint.states_of(self._keys, spec, dump_optimizer))

    def load_optimizer_states(self, path: str | PathLike[str]) -> None:
        """See `KVStore.load_optimizer_states`."""
        self._check_open("load_optimizer_states")
        name = os.fspath(path)
        checkpoint = read_checkpoint(name)
        checkpoint_fit.require_states(name, checkpoint)
        optimizer = checkpoint_fit.optimizer_in(name, checkpoint) or self._require_optimizer("load_optimizer_states")
        checkpoint_fit.check_states(name, checkpoint, local_checkpoint.extents(self._keys), optimizer)
        self._restore_optimizer(optimizer, checkpoint)

    def close(self) -> None:
        """See `KVStore.close`."""
        self._closed = True
        self._keys.clear()

    # --- checks, then changes -------------------------------------------------------------------------------------

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"{what}: this store is closed")

    def _check_compressing(self, what: str) -> None:
        self._check_open(what)
        if self._kind == LOCAL:
            raise NotSupportedError(
                f"{what}: a 'local' store does not compress; use create('device') or a dist_* store"
            )

    def _require_optimizer(self, what: str) -> Installed:
        if self._optimizer is None:
            raise ConfigError(f"{what}: no optimizer is set; call set_optimizer first")
        return self._optimizer

    def _known(self, key: Key, what: str) -> LocalKey:
        local = self._keys.get(key)
        if local is None:
            raise not_initialized(key, what, self._keys)
        return local

    def _single_values(self, key: Keys, value: Array, what: str) -> list[tuple[Key, NDArray, Template]]:
        """Read one array per key, of a type that can be stored."""
        self._check_open(what)
        found = []
        for one, arrays in pair_values(key, value, what):
            if len(arrays) != 1:
                raise ArrayError(f"{what} takes one array per key, key {one!r} has {len(arrays)}", key=one)
            found.append((one, host_view(arrays[0], one), self._template(one, arrays[0])))
        return found

    def _template(self, key: Key, array: Any) -> Template:
        template = describe(array, key)
        if self._policy is not None:
            self._policy.params_for(key, 0, template.dtype)
        return template if template.kind != "python" else Template(template.shape, template.dtype)

    def _checked_values(self, key: Keys, value: Array, what: str) -> list[tuple[LocalKey, list[Any]]]:
        self._check_open(what)
        pairs = []
        for one, arrays in pair_values(key, value, what):
            local = self._known(one, what)
            for array in arrays:
                check_match(local.template, array, one, what)
            if self._optimizer is not None and not is_float(local.template.dtype):
                raise ArrayError(
                    f"{what}: key {one!r} holds {local.template.dtype.name}; optimizers need a floating point key",
                    key=one,
                )
            pairs.append((local, arrays))
        return pairs

    def _checked_outs(self, key: Keys, out: Array, what: str) -> Outs:
        self._check_open(what)
        templates = {one: self._known(one, what).template for one in keys_of(key)}
        outs = pair_outs(key, out, what)
        self._check_outs(outs, templates, what)
        return outs

    @staticmethod
    def _check_outs(outs: Outs, templates: Mapping[Key, Template], what: str) -> None:
        for key, targets in outs:
            for target in targets:
                check_writable(target, key)
                check_match(templates[key], target, key, f"{what}: out")

    def _push(self, pairs: Sequence[tuple[LocalKey, list[Any]]]) -> None:
        on_device = self._kind == DEVICE
        fits = [local.fit(arrays, self._policy, on_device) for local, arrays in pairs]
        apply = self._rule()
        for (local, _), fit in zip(pairs, fits, strict=True):
            apply(local, local.reduce(fit))

    def _rule(self) -> Callable[[LocalKey, Any], None]:
        """What a sum does to the value of its key."""
        if self._optimizer is not None:
            rule = self._optimizer[1]
            return lambda local, total: local.update(rule, total)
        if self._updater is not None:
            updater = self._updater
            return lambda local, total: local.update_by(updater, total)
        return LocalKey.replace

    def _pull(self, key: Keys, out: Array, outs: Outs) -> Any:
        results = [self._keys[one].read(targets) for one, targets in outs]
        return mirrored(key, results) if out is None else out

    def _restore_optimizer(self, optimizer: Installed | None, checkpoint: Checkpoint) -> None:
        self._optimizer = optimizer
        if optimizer is not None:
            self._updater = None
        local_checkpoint.restore_states(self._keys, checkpoint)


def not_initialized(key: Key, what: str, known: Mapping[Key, Any]) -> KeyNotInitializedError:
    """The error for a key nobody initialised here; says so where only the type differs, 3 and '3'."""
    twin: Key = str(key) if isinstance(key, int) else int(key) if key.lstrip("-").isdecimal() else key
    hint = f"; there is a key {twin!r}, which is another one" if twin != key and twin in known else ""
    return KeyNotInitializedError(
        f"{what}: key {key!r} is not initialised on this worker: call init or broadcast first{hint}", key=key
    )


def _named(key: Keys) -> str:
    return repr(key if isinstance(key, int | str) else list(key))
