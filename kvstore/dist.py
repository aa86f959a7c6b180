"""`DistStore`: the distributed modes. Values live on the servers; this is a worker's end.

The calling thread checks, sums the arrays of its devices, and encodes; the worker's thread (`worker_thread`) sends,
receives and writes pulled chunks straight into their destination, so both go on at once.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

from kvstore import dist_requests as requests
from kvstore.arrays import check_writable, describe, host_view
from kvstore.compression.encoder import Prepared
from kvstore.compression.policy import RAW, CompressionPolicy
from kvstore.config import Config
from kvstore.dist_exchange import pull_parts, push_parts
from kvstore.dist_key import Destination, DistKey
from kvstore.dist_link import Link
from kvstore.dist_state import DistState
from kvstore.dist_stats import collect
from kvstore.errors import (
    ArrayError,
    ClosedError,
    ConfigError,
    KeyExistsError,
    KeyNotInitializedError,
    KVStoreError,
    NonFiniteError,
    NotSupportedError,
)
from kvstore.handle import Handle
from kvstore.keys import keys_of, mirrored, pair_outs, pair_values
from kvstore.machine import SCHEDULER, server_address
from kvstore.messages import AskStatus, Key, Role, SetCompression, SetLearningRate, SetOptimizer, Status
from kvstore.optimizer import find_optimizer, make_spec, spec_to_json
from kvstore.session import Part, Push, Request
from kvstore.store import Array, Keys, KVStore, Updater
from kvstore.wire import frame_bytes
from kvstore.worker_thread import WorkerThread

ASSIGN_WAVE = 16
"""Messages of `init` that are on the way at once."""


class DistStore(KVStore):
    """See `KVStore` for the calls. Made by `kvstore.create`; joins the job, and returns when the job is complete."""

    def __init__(self, name: str, config: Config, average: bool = False) -> None:
        """`name`: 'dist_sync', 'dist_async' or the same with 'device', which sums on the arrays' device."""
        self._name = name
        self._config = config
        self._sync = name.endswith("_sync")
        self._on_device = "_device_" in name
        self._average = average
        self._lock = threading.RLock()
        self._keys: dict[Key, DistKey] = {}
        self._policy: CompressionPolicy | None = None
        self._optimizer = False
        self._whole = False
        self._turns = dict.fromkeys(("barrier", "compression", "optimizer", "load"), 0)
        self._pid = os.getpid()
        self._closed = False
        self._thread = WorkerThread(config)
        self._thread.start()
        self._link = Link(config, self._thread)
        atexit.register(self._close_at_exit)

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
        wanted = None if role is None else Role(role)
        if timeout is None:
            return self._thread.machine.member.num_dead(wanted)
        status = self._status(SCHEDULER)
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
        with self._lock:
            self._check_open()
            for name, _ in pairs:
                if name in self._keys:
                    raise KeyExistsError(
                        f"key {name!r} is already initialised and keeps its value; overwrite it by broadcast", key=name
                    )
            keys = [self._new_key(name, array) for name, array in pairs]
            self._assign(keys, pairs, "init")
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
        """See `KVStore`."""
        pairs = self._single_values(key, value, "broadcast")
        with self._lock:
            self._check_open()
            keys = [self._redefined(name, array) for name, array in pairs]
            self._assign(keys, pairs, "broadcast")
            for one in keys:
                one.encoder.reset()
            self._keys.update((one.key, one) for one in keys)
        return self.pull(keys_of(key) if isinstance(key, Mapping) else key, out, priority)

    def push_async(self, key: Keys, value: Array = None, priority: int = 0) -> Handle:
        """See `KVStore`."""
        return self._exchange("push", key, value, None, priority, pull=False, copy=False)

    def pushpull_async(self, key: Keys, value: Array = None, out: Array = None, priority: int = 0) -> Handle:
        """See `KVStore`."""
        return self._exchange("pushpull", key, value, out, priority, pull=True, copy=False)

    def pull_async(self, key: Keys, out: Array = None, priority: int = 0) -> Handle:
        """See `KVStore`."""
        given = pair_outs(key, out, "pull")
        with self._lock:
            self._check_open()
            self._link.raise_deferred()
            keys = [self._known(name, "pull") for name, _ in given]
            destinations = self._destinations(keys, given)
            parts = pull_parts(keys, destinations, priority)
            what = f"pull of {_listed(keys)}"
            operation, handle = self._link.begin(what, len(parts), _finisher(key, out, keys, given, destinations))
            self._thread.submit(operation, parts)
        return handle

    def _exchange(
        self, what: str, key: Keys, value: Array, out: Array, priority: int, *, pull: bool, copy: bool
    ) -> Handle:
        pairs = pair_values(key, value, what)
        given = pair_outs(key, out, what) if pull else []
        with self._lock:
            self._check_open()
            if pull:
                self._link.raise_deferred()
            keys = [self._known(name, what) for name, _ in pairs]
            for one, (_, arrays) in zip(keys, pairs, strict=True):
                for array in arrays:
                    one.check(array, f"the value to {what}")
            destinations = self._destinations(keys, given) if pull else None
            self._check_updatable(what)
            prepared = self._prepared(keys, [arrays for _, arrays in pairs])
            finish = _finisher(key, out, keys, given, destinations) if destinations is not None else None
            count = sum(len(one.chunks) for one in keys) * (2 if pull else 1)
            operation, handle = self._link.begin(f"{what} of {_listed(keys)}", count, finish)
            batches = push_parts(list(zip(keys, prepared, strict=True)), destinations, priority, copy)
            self._link.feed(operation, batches, _pushed_bytes)
        return handle

    def _prepared(self, keys: Sequence[DistKey], values: Sequence[Sequence[Any]]) -> list[Prepared]:
        """Sum over devices and check everything; nothing has changed when this raises."""
        policy = self._policy
        try:
            return [
                key.encoder.prepare(
                    key.reduce(arrays, self._on_device),
                    RAW if policy is None else policy.params_for(key.key, key.elements, key.dtype),
                    key.round + 1,
                )
                for key, arrays in zip(keys, values, strict=True)
            ]
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
        spec = make_spec(optimizer, **params)
        text, rank = spec_to_json(spec), self.rank
        with self._lock:
            self._check_open()
            turn = self._next_turn("optimizer")
            build = _set_optimizer(rank, turn, text)
            self._link.run(f"set_optimizer({spec.name!r})", requests.to_all_servers(self._config.num_servers, build))
            self._optimizer = True
            self._whole = find_optimizer(spec.name).whole

    def set_learning_rate(
        self, learning_rate: float | None = None, multipliers: Mapping[str, float] | None = None
    ) -> None:
        """See `KVStore`. Any rank's call takes effect at once; call it after the round's pull, alike on every rank."""
        rank = self.rank
        factors = None if multipliers is None else {str(key): float(factor) for key, factor in multipliers.items()}
        with self._lock:
            self._check_open()
            parts = requests.to_all_servers(
                self._config.num_servers,
                lambda number, left: SetLearningRate(
                    sequence=number, rank=rank, learning_rate=learning_rate, multipliers=factors
                ),
            )
            self._link.run("set_learning_rate", parts)

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
        self._agree_on(CompressionPolicy.parse(params, per_key))

    def clear_gradient_compression(self, flush: bool = True) -> None:
        """See `KVStore`. Every rank calls it."""
        self._agree_on(None)
        if not flush:
            for key in self._keys.values():
                key.encoder.reset()

    def _agree_on(self, policy: CompressionPolicy | None) -> None:
        text = json.dumps(None if policy is None else policy.to_wire(), sort_keys=True)
        rank = self.rank
        with self._lock:
            self._check_open()
            turn = self._next_turn("compression")
            self._link.run("set_gradient_compression", [requests.agreement(rank, "compression", turn, text)])
            if rank == 0:
                build = _set_compression(rank, text)
                parts = requests.to_all_servers(self._config.num_servers, build)
                self._link.run("set_gradient_compression", parts)
            self._policy = policy

    # --- the job --------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """See `KVStore`."""
        with self._lock:
            self._check_open()
            self._link.flush()
            self._link.run("barrier", [requests.barrier(self.rank, self._next_turn("barrier"))])

    def stats(self) -> dict[str, Any]:
        """See `KVStore`; also 'pulled_bytes'. Decoding happens on the servers: `decode_seconds` is 0 here."""
        return collect(self._keys.values(), self._config.num_servers)

    def save(self, path: str | PathLike[str]) -> None:
        """See `KVStore`. Every rank calls it: the lowest live rank writes `path`, each its residuals to `path.rankN`."""
        with self._lock:
            self._check_open()
            self._link.flush()
            self._state().save(path)

    def load(self, path: str | PathLike[str]) -> None:
        """See `KVStore`. Every rank calls it, after `init` of the keys; rank 0 reads `path`, each its `path.rankN`."""
        with self._lock:
            self.barrier()
            self._state().load(path)
            self.barrier()

    def save_optimizer_states(self, path: str | PathLike[str], dump_optimizer: bool = False) -> None:
        """See `KVStore`. Every rank calls it; the lowest live rank writes."""
        with self._lock:
            self._check_open()
            self._link.flush()
            self._state().save_optimizer(path, dump_optimizer)

    def load_optimizer_states(self, path: str | PathLike[str]) -> None:
        """See `KVStore`. Every rank calls it; rank 0 reads the file."""
        with self._lock:
            self.barrier()
            self._state().load_optimizer(path)
            self.barrier()

    def close(self) -> None:
        """See `KVStore`. Raises what an earlier push failed with; the job has been left then too."""
        if self._closed or os.getpid() != self._pid:
            return
        try:
            self._link.flush()
        finally:
            self._closed = True
            self._thread.close()
            atexit.unregister(self._close_at_exit)

    # --- shared ---------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this {self.type!r} store belongs to process {self._pid}, which was forked: create one in the child"
            )
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
        return DistKey(key, template, config.chunk_elements, config.num_servers, self.rank, self._whole, epoch=1)

    def _redefined(self, key: Key, array: Any) -> DistKey:
        old, new = self._keys.get(key), self._new_key(key, array)
        if old is None:
            return new
        new.epoch, new.round, new.whole, new.counters = old.epoch + 1, old.round, old.whole, old.counters
        return new

    def _assign(self, keys: Sequence[DistKey], pairs: Sequence[tuple[Key, Any]], what: str) -> None:
        config = self._config
        if self.rank == 0:
            flats = [host_view(array, name).reshape(-1) for name, array in pairs]
            values = list(zip(keys, flats, strict=True))
            waves = requests.assignments(values, self._sync, self._average, config.message_bytes)
            while wave := list(itertools.islice(waves, ASSIGN_WAVE)):
                self._link.run(f"{what} of {_listed(keys)}", wave)
            return
        known = {key.key: key for key in keys}

        def learn(key: Key, whole: bool) -> None:
            known[key].whole = whole

        self._declare([(key, key.server(0)) for key in keys], learn, what)
        self._declare([(key, server) for key in keys for server in key.servers - {key.server(0)}], learn, what)

    def _declare(self, targets: list[tuple[DistKey, int]], learn: Callable[[Key, bool], None], what: str) -> None:
        """Wait until rank 0 has given the keys their values; first at home, which tells how a key is placed."""
        parts = requests.declarations(targets, self._sync, self._average, learn)
        self._link.run(f"{what} of {_listed([key for key, _ in targets])}", parts)

    def _check_updatable(self, what: str) -> None:
        if self._sync or self._optimizer:
            return
        if self._status(server_address(0)).optimizer is None:
            raise ConfigError(
                f"{what} on {self.type!r} needs an optimizer on the servers: call set_optimizer first", rank=self.rank
            )
        self._optimizer = True

    def _status(self, address: str) -> Status:
        found: list[Status] = []

        def answered(answer: object, frames: object) -> None:
            assert isinstance(answer, Status)
            found.append(answer)

        self._link.run(f"status of {address}", [Request(address, _ask_status, answered=answered)])
        return found[0]

    def _state(self) -> DistState:
        gone = self._thread.machine.member.gone
        live = [rank for rank in range(self.num_workers) if (Role.WORKER, rank) not in gone]
        return DistState(self._link, self._keys, self.rank, min(live), self._agree_to_load)

    def _agree_to_load(self, outcome: str) -> None:
        turn = self._next_turn("load")
        self._link.run("load", [requests.agreement(self.rank, "load", turn, outcome)])

    def _next_turn(self, topic: str) -> int:
        self._turns[topic] += 1
        return self._turns[topic]

    def _close_at_exit(self) -> None:
        """The interpreter ends without `close`: leave if all went well, else tell the others at once."""
        if self._closed or os.getpid() != self._pid:
            return
        failed = getattr(sys, "last_type", None) is not None
        with contextlib.suppress(KVStoreError):
            if not failed:
                self._link.flush()
        self._closed = True
        self._thread.close(leave=not failed)


def _finisher(
    key: Keys,
    out: Array,
    keys: Sequence[DistKey],
    given: Sequence[tuple[Key, list[Any]]],
    destinations: Sequence[Destination],
) -> Callable[[], Any]:
    def finish() -> Any:
        new = [destination.finish() for destination in destinations]
        for one in keys:
            one.counters.pulls += 1
        if out is not None and all(outs for _, outs in given):
            return out
        results = [
            value if not outs else outs[0] if len(outs) == 1 else outs
            for value, (_, outs) in zip(new, given, strict=True)
        ]
        return mirrored(key, results)

    return finish


def _pushed_bytes(part: Part) -> int:
    return frame_bytes(part.frame) if isinstance(part, Push) else 0


def _listed(keys: Sequence[DistKey]) -> str:
    names = ", ".join(repr(key.key) for key in keys[:3])
    return f"key {names}" if len(keys) == 1 else f"{len(keys)} keys ({names}{', ...' if len(keys) > 3 else ''})"


def _ask_status(number: int, left: float) -> AskStatus:
    return AskStatus(sequence=number)


def _set_optimizer(rank: int, turn: int, spec: str) -> Callable[[int, float], SetOptimizer]:
    return lambda number, left: SetOptimizer(sequence=number, rank=rank, turn=turn, spec=spec, timeout=left * 0.9)


def _set_compression(rank: int, params: str) -> Callable[[int, float], SetCompression]:
    return lambda number, left: SetCompression(sequence=number, rank=rank, params=params)
