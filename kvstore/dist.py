"""`DistStore`: the distributed modes. Values live on the servers; this is a worker's end.

The calling thread checks, sums the arrays of its devices, and encodes; the worker's thread (`worker_thread`) sends,
receives and writes pulled chunks straight into their destination, so both go on at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

from kvstore import dist_requests as requests
from kvstore.arrays import check_writable, describe
from kvstore.compression.encoder import Prepared
from kvstore.compression.kernels import warm_up
from kvstore.compression.policy import RAW, CompressionPolicy
from kvstore.config import Config
from kvstore.dist_assign import assign, declare
from kvstore.dist_exchange import finisher, pull_parts, push_parts, pushed_bytes
from kvstore.dist_key import Destination, DistKey, listed
from kvstore.dist_link import Link
from kvstore.dist_settings import JobSettings
from kvstore.dist_state import DistState
from kvstore.dist_stats import collect
from kvstore.dist_whole import check_placement, check_whole
from kvstore.errors import (
    ArrayError,
    ClosedError,
    KeyExistsError,
    KeyNotInitializedError,
    KVStoreError,
    NonFiniteError,
    NotSupportedError,
    PeerLeftError,
    PeerLostError,
)
from kvstore.handle import Handle
from kvstore.keys import pair_outs, pair_values
from kvstore.machine import SCHEDULER
from kvstore.messages import Key, Role
from kvstore.optimizer import make_spec
from kvstore.staleness import bounded_rate, check_synchronous, rate_from_theory
from kvstore.store import Array, Keys, KVStore, Updater, role_to_count
from kvstore.worker_thread import WorkerThread


class DistStore(KVStore):
    """See `KVStore` for the calls. Made by `kvstore.create`; joins the job, and returns when the job is complete."""

    def __init__(self, name: str, config: Config, average: bool = False) -> None:
        """`name`: 'dist_sync', 'dist_async' or the same with 'device', which sums on the arrays' device."""
        if not name.endswith("_async"):
            check_synchronous(name, config)
        self._name = name
        self._config = config
        self._sync = name.endswith("_sync")
        self._on_device = "_device_" in name
        self._average = average
        self._lock = threading.RLock()
        self._keys: dict[Key, DistKey] = {}
        self._pid = os.getpid()
        self._closed = False
        self._thread = WorkerThread(config)
        self._thread.start()
        self._link = Link(config, self._thread)
        self._settings = JobSettings(self._link, self.rank, config.num_servers)

    # --- who am I -------------------------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        """The name given to `create`."""
        return self._name

    @property
    def rank(self) -> int:
        """This worker's number."""
        rank = self._thread.machine.member.rank
        assert rank is not None
        return rank

    @property
    def num_workers(self) -> int:
        """The number of workers of the job."""
        return self._config.num_workers

    def num_dead_node(self, role: str | None = None, timeout: float | None = None) -> int:
        """See `KVStore`. With `timeout` the scheduler is asked how long it has not heard of each process."""
        self._check_open()
        wanted = role_to_count(role)
        if timeout is None:
            return self._thread.machine.member.num_dead(wanted)
        status = self._settings.status(SCHEDULER)
        return sum(
            process.state == "lost" or (process.state == "active" and process.age > timeout)
            for process in status.processes
            if wanted in (None, process.role)
        )

    def is_capable(self, capability: str) -> bool:
        """See `KVStore`."""
        return capability.lower() in ("optimizer", "compression", "asynchronous")

    # --- values ---------------------------------------------------------------------------------------------------

    def init(self, key: Keys, value: Array = None) -> None:
        """See `KVStore`."""
        pairs = self._single_values(key, value, "init")
        with self._opened():
            for name, _ in pairs:
                if name in self._keys:
                    raise KeyExistsError(
                        f"key {name!r} is already initialised and keeps its value; overwrite it by broadcast", key=name
                    )
            keys = [self._new_key(name, array) for name, array in pairs]
            self._assign(keys, pairs)
            self._keys.update((key.key, key) for key in keys)

    def push(self, key: Keys, value: Array = None, priority: int = 0) -> None:
        """See `KVStore`."""
        self._link.leave_behind(self._exchange("push", key, value, None, priority, pull=False, copy=True))

    def pull(self, key: Keys, out: Array = None, priority: int = 0) -> Any:
        """See `KVStore`."""
        return self._link.wait(self.pull_async(key, out, priority))

    def pushpull(self, key: Keys, value: Array = None, out: Array = None, priority: int = 0) -> Any:
        """See `KVStore`."""
        return self._link.wait(self.pushpull_async(key, value, out, priority))

    def broadcast(self, key: Keys, value: Array = None, out: Array = None, priority: int = 0) -> Any:
        """See `KVStore`. Waits for all ranks first: none may see the new value before its own call."""
        pairs = self._single_values(key, value, "broadcast")
        outs = pair_outs(key, out, "broadcast")
        with self._opened():
            self._link.flush()
            keys = [self._redefined(name, array) for name, array in pairs]
            self._destinations(keys, outs)
            self._settings.agree("broadcast", json.dumps([name for name, _ in pairs]))
            self._assign(keys, pairs)
            self._keys.update((one.key, one) for one in keys)
        return self._link.wait(self._pull(key, out, priority))

    def push_async(self, key: Keys, value: Array = None, priority: int = 0) -> Handle:
        """See `KVStore`."""
        handle = self._exchange("push", key, value, None, priority, pull=False, copy=False)
        self._link.leave_behind(handle, deferred=False)
        return handle

    def pushpull_async(self, key: Keys, value: Array = None, out: Array = None, priority: int = 0) -> Handle:
        """See `KVStore`."""
        handle = self._exchange("pushpull", key, value, out, priority, pull=True, copy=False)
        self._link.leave_behind(handle, deferred=False)
        return handle

    def pull_async(self, key: Keys, out: Array = None, priority: int = 0) -> Handle:
        """See `KVStore`."""
        return self._pull(key, key if out is None and isinstance(key, Mapping) else out, priority)

    def _pull(self, key: Keys, out: Array, priority: int) -> Handle:
        given = pair_outs(key, out, "pull")
        with self._opened():
            self._link.raise_deferred()
            keys = [self._known(name, "pull") for name, _ in given]
            destinations = self._destinations(keys, given)
            parts = pull_parts(keys, destinations, priority)
            what = f"pull of {listed(keys)}"
            operation, handle = self._link.begin(what, len(parts), finisher(key, out, keys, given, destinations))
            self._thread.submit(operation, parts)
        return handle

    def _exchange(
        self, what: str, key: Keys, value: Array, out: Array, priority: int, *, pull: bool, copy: bool
    ) -> Handle:
        pairs = pair_values(key, value, what)
        given = pair_outs(key, out, what) if pull else []
        with self._opened():
            if pull:
                self._link.raise_deferred()
            keys = [self._known(name, what) for name, _ in pairs]
            for one, (_, arrays) in zip(keys, pairs, strict=True):
                for array in arrays:
                    one.check(array, f"the value to {what}")
            destinations = self._destinations(keys, given) if pull else None
            if not self._sync:
                self._settings.check_optimizer(what)
            self._link.check_room()
            prepared = self._prepared(keys, [arrays for _, arrays in pairs])
            finish = finisher(key, out, keys, given, destinations) if destinations is not None else None
            count = sum(one.parts for one in prepared) + (sum(len(one.chunks) for one in keys) if pull else 0)
            operation, handle = self._link.begin(f"{what} of {listed(keys)}", count, finish)
            batches = push_parts(list(zip(keys, prepared, strict=True)), destinations, priority, copy)
            self._link.feed(operation, batches, pushed_bytes)
        return handle

    def _prepared(self, keys: Sequence[DistKey], values: Sequence[Sequence[Any]]) -> list[Prepared]:
        """Sum over devices and check everything; nothing has changed when this raises."""
        policy = self._settings.compression
        try:
            prepared = [
                key.encoder.prepare(
                    key.reduce(arrays, self._on_device),
                    RAW if policy is None else policy.params_for(key.key, key.elements, key.dtype),
                    key.round + 1,
                )
                for key, arrays in zip(keys, values, strict=True)
            ]
            check_whole(zip(keys, prepared, strict=True), self._config.limits.frame)
            return prepared
        except NonFiniteError as error:
            parts = requests.refusals(keys, error)
            operation, handle = self._link.begin("refusal", len(parts))
            self._thread.submit(operation, parts)
            with contextlib.suppress(KVStoreError):  # the refusal is what the caller has to hear of
                self._link.wait(handle)
            raise

    def _destinations(self, keys: Sequence[DistKey], given: Sequence[tuple[Key, list[Any]]]) -> list[Destination]:
        for one, (_, outs) in zip(keys, given, strict=True):
            for out in outs:
                check_writable(out, one.key)
                one.check(out, "out")
        return [Destination(one, outs) for one, (_, outs) in zip(keys, given, strict=True)]

    # --- updates and compression ----------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: Any, **params: Any) -> None:
        """See `KVStore`. Rank 0's call installs it on the servers; other ranks' calls wait for that and compare."""
        spec = bounded_rate(make_spec(optimizer, **rate_from_theory(params, self._config)), self._config)
        with self._opened():
            self._settings.set_optimizer(spec)

    def set_learning_rate(
        self, learning_rate: float | None = None, multipliers: Mapping[str, float] | None = None
    ) -> None:
        """See `KVStore`. Any rank's call takes effect at once; call it after the round's pull, alike on every rank."""
        factors = None if multipliers is None else {str(key): float(factor) for key, factor in multipliers.items()}
        with self._opened():
            self._settings.set_learning_rate(learning_rate, factors)

    def set_updater(self, updater: Updater | None) -> None:
        """Not on a distributed store: no code travels to the servers."""
        raise NotSupportedError(
            f"set_updater is not supported by {self.type!r}: updates run on the servers, and no code is sent to them; "
            "use set_optimizer, with an own class registered by register_optimizer if need be"
        )

    def set_gradient_compression(
        self, params: Mapping[str, Any], per_key: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """See `KVStore`. Returns once every rank has called it with the same setting."""
        policy = CompressionPolicy.parse(params, per_key)
        warm_up()
        with self._opened():
            for key in self._keys.values():
                policy.params_for(key.key, key.elements, key.dtype)
            check_placement(policy, self._keys.values())
            self._settings.set_compression(policy)

    def clear_gradient_compression(self, flush: bool = True) -> None:
        """See `KVStore`. Every rank calls it."""
        with self._opened():
            self._settings.set_compression(None)
            for key in [] if flush else self._keys.values():
                key.encoder.reset()

    # --- the job --------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """See `KVStore`."""
        with self._opened():
            self._link.flush()
            self._settings.barrier()

    def stats(self) -> dict[str, Any]:
        """See `KVStore`. Decoding happens on the servers: `decode_seconds` is 0 here."""
        return collect(list(self._keys.values()), self._config.num_servers)

    def save(self, path: str | PathLike[str]) -> None:
        """See `KVStore`. Every rank calls it: the lowest live one writes `path`, each its residuals to `path.rankN`."""
        with self._opened():
            self._settle()
            self._state().save(path)
            self._settle()

    def load(self, path: str | PathLike[str]) -> None:
        """See `KVStore`. Every rank calls it, after `init` of the keys; rank 0 takes its values from `path`.

        Each rank restores what it had not sent yet from its `path.rankN`, if that is of the same save, and starts with
        nothing unsent otherwise.
        """
        with self._opened():
            self.barrier()
            self._state().load(path)
            self._settings.learn_optimizer()

    def save_optimizer_states(self, path: str | PathLike[str], dump_optimizer: bool = False) -> None:
        """See `KVStore`. Every rank calls it; the lowest live rank writes."""
        with self._opened():
            self._settle()
            self._state().save_optimizer(path, dump_optimizer)
            self._settle()

    def load_optimizer_states(self, path: str | PathLike[str]) -> None:
        """See `KVStore`. Every rank calls it; rank 0 reads the file."""
        with self._opened():
            self.barrier()
            self._state().load_optimizer(path)
            self._settings.learn_optimizer()

    def close(self) -> None:
        """See `KVStore`. Raises what an earlier push failed with; the job has been left then too."""
        if self._closed or os.getpid() != self._pid:
            return
        try:
            self._link.flush()
        finally:
            self._closed = True
            self._link.close()
            self._keys.clear()

    # --- shared ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        """One call at a time; the process is checked first, since a fork may have copied a lock that is held."""
        self._check_process()
        with self._lock:
            self._check_open()
            yield

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this {self.type!r} store belongs to process {self._pid}, which was forked: create one in the child"
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError(f"this {self.type!r} store is closed")

    def _known(self, key: Key, what: str) -> DistKey:
        if key not in self._keys:
            raise KeyNotInitializedError(
                f"{what} of key {key!r}: rank {self.rank} has not called init or broadcast for it", key=key,
                rank=self.rank,
            )  # fmt: skip
        return self._keys[key]

    def _single_values(self, key: Keys, value: Array, what: str) -> list[tuple[Key, Any]]:
        pairs = pair_values(key, value, what)
        for name, arrays in pairs:
            if len(arrays) != 1:
                raise ArrayError(f"{what} of key {name!r} takes one array, got a list of {len(arrays)}", key=name)
        return [(name, arrays[0]) for name, arrays in pairs]

    def _new_key(self, key: Key, array: Any) -> DistKey:
        config = self._config
        template = describe(array, key)
        policy = self._settings.compression
        whole = self._settings.whole or (policy is not None and policy.whole(key, template.dtype))
        return DistKey(
            key, template, config.chunk_elements, config.num_servers, self.rank, whole,
            -1 if config.staleness is None else config.staleness, config.on_stale, epoch=1,
        )  # fmt: skip

    def _redefined(self, key: Key, array: Any) -> DistKey:
        old, new = self._keys.get(key), self._new_key(key, array)
        if old is None:
            return new
        new.epoch, new.round, new.counters = old.epoch + 1, old.round, old.counters
        return new

    def _assign(self, keys: Sequence[DistKey], pairs: Sequence[tuple[Key, Any]]) -> None:
        if self.rank == 0:
            values = [array for _, array in pairs]
            assign(self._link, keys, values, self._sync, self._average, self._config.message_bytes)
        else:
            declare(self._link, keys, self._sync, self._average)

    def _settle(self) -> None:
        """Wait until no rank changes anything; with a rank gone, what is left can still be saved."""
        self._link.flush()
        with contextlib.suppress(PeerLostError, PeerLeftError):
            self._settings.barrier()

    def _state(self) -> DistState:
        gone = dict(self._thread.machine.member.gone)
        live = [rank for rank in range(self.num_workers) if (Role.WORKER, rank) not in gone]
        return DistState(self._link, self._keys, self.rank, min(live), self._settings.agree, self.num_workers)
