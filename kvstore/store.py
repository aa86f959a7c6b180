"""`KVStore`: what every store offers. Names and meaning are those of MXNet's KVStore.

**Keys** are `int` (-2**63 to 2**63 - 1) or `str` (any, also ''); 3 and '3' are different keys. Every call that takes
`key` takes one key, a list of keys, or a mapping from keys to arrays, which then stands for `value` (in `pull` for
`out`).

**Arrays** may be of NumPy, CuPy, torch, jax, or anything with DLPack, `__array_interface__`,
`__cuda_array_interface__` or `__array__`; any shape (also () and (0,)), any strides, read-only ones too. Dtypes:
float16, bfloat16, float32, float64, (u)int8 to (u)int64, bool. Python numbers and nested lists of them become arrays,
in `push` of the key's dtype. Results never share memory with arguments, nor with what the store keeps.

**A value** is one array per key, or a list of arrays, one per device, which are summed in list order. All arrays of a
key have the shape and dtype of its `init`. A call is checked whole, all keys of it, before any of it takes effect.

**Sums, not means**: without an optimizer or updater the sum replaces the value; with one, value <- update(value, sum).
A store created with `average=True` divides the sum by the number of workers that contributed. Float16 and bfloat16
keys are summed and kept in float32; integer keys in their own dtype (they wrap), bool by logical or.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Self, TypeAlias

import numpy as np

from kvstore.errors import NotSupportedError, ParameterError
from kvstore.handle import Handle
from kvstore.messages import Key, Role

Keys: TypeAlias = Key | Sequence[Key] | Mapping[Any, Any]
"""One key, a list of keys, or a mapping from keys to arrays."""

Array: TypeAlias = Any
"""An array of any supported library, or a list of them, one per device."""

Updater: TypeAlias = Callable[[Key, np.ndarray[Any, Any], np.ndarray[Any, Any]], None]
"""(key, summed gradient, value): changes the value in place."""


class KVStore(ABC):
    """A key-value store for data-parallel training; also a context manager that closes it."""

    # --- who am I -------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def type(self) -> str:
        """The name given to `create`."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This worker's number, 0 to num_workers - 1."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """The number of workers of the job; 1 on local stores."""

    @abstractmethod
    def num_dead_node(self, role: str | None = None, timeout: float | None = None) -> int:
        """Return how many processes of the job died.

        Args:
            role: 'scheduler', 'server' or 'worker'; None counts all.
            timeout: seconds of silence that count as death; None: the job's setting.

        Raises:
            ParameterError: no such role.
        """

    @abstractmethod
    def is_capable(self, capability: str) -> bool:
        """Return whether this store has a capability: 'optimizer', 'updater', 'compression', 'asynchronous'.

        Names are compared without regard to case; an unknown one is False.
        """

    # --- values ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def init(self, key: Keys, value: Array = None) -> None:
        """Create keys: rank 0's values become the values; other ranks give shape and dtype, and wait for rank 0.

        Args:
            key: one key, a list of keys, or a mapping from keys to arrays.
            value: one array per key. Its library and device are those of arrays that `pull` returns.

        Raises:
            KeyExistsError: a key has been initialised; its value is unchanged. To overwrite: `broadcast`.
            ArrayError: a value is not one array of a supported dtype, or differs from rank 0's in shape or dtype.
        """

    @abstractmethod
    def push(self, key: Keys, value: Array = None, priority: int = 0) -> None:
        """Add this worker's values to the sums of the next round. The arrays may be overwritten once it returns.

        Args:
            key: one key, a list of keys, or a mapping from keys to arrays.
            value: per key one array, or a list of arrays (one per device), of the key's shape and dtype.
            priority: larger goes first. Never changes results.

        Raises:
            KeyNotInitializedError: this worker has not called `init` or `broadcast` for a key.
            ArrayError: shape or dtype differ from the key's.
            NonFiniteError: NaN or infinity in a gradient that is to be compressed (`on_nonfinite` of the codec).

        After any of these nothing was sent, and no value or residual changed.
        """

    @abstractmethod
    def pull(self, key: Keys, out: Array = None, priority: int = 0) -> Any:
        """Fetch values at the version that contains all own pushes.

        Args:
            key: one key, a list of keys, or a mapping from keys to the arrays to write into.
            out: None, or per key an array, or a list of arrays that all get the value; of the key's shape and dtype,
                any strides, writable. Memory between the elements of a strided `out` is left alone.
            priority: larger goes first.

        Returns:
            `out`, or, where none was given, a new writable array of the library and device given to `init`; a list for
            a list of keys, a dict for a mapping.

        Raises:
            KeyNotInitializedError, ArrayError: as `push`; an `out` that is read-only is an ArrayError.
        """

    @abstractmethod
    def pushpull(self, key: Keys, value: Array = None, out: Array = None, priority: int = 0) -> Any:
        """`push` then `pull` in one exchange. Args, result and errors as theirs; `out` may be `value` itself."""

    @abstractmethod
    def broadcast(self, key: Keys, value: Array = None, out: Array = None, priority: int = 0) -> Any:
        """Create keys or overwrite them with rank 0's values, then `pull`. Every rank must call it.

        Residuals and optimizer state of the keys are reset, on every rank. A changed shape or dtype redefines the key.
        Args and result: as `init` and `pull`.
        """

    @abstractmethod
    def push_async(self, key: Keys, value: Array = None, priority: int = 0) -> Handle:
        """`push` that returns at once; `value` must stay unchanged until `done()`. Errors surface in `wait`."""

    @abstractmethod
    def pull_async(self, key: Keys, out: Array = None, priority: int = 0) -> Handle:
        """`pull` that returns at once; `wait` returns its result. Errors surface in `wait`."""

    @abstractmethod
    def pushpull_async(self, key: Keys, value: Array = None, out: Array = None, priority: int = 0) -> Handle:
        """`pushpull` that returns at once; `wait` returns its result. Errors surface in `wait`."""

    def row_sparse_pull(self, key: Keys, out: Array = None, row_ids: Array = None, priority: int = 0) -> Any:
        """Fetch some rows only. Not offered by this store.

        Raises:
            NotSupportedError: always; use `pull` and take the rows there.
        """
        raise NotSupportedError(
            f"row_sparse_pull is not supported by the {self.type!r} store: pull the whole key and index its rows"
        )

    # --- updates --------------------------------------------------------------------------------------------------

    @abstractmethod
    def set_optimizer(self, optimizer: Any, **params: Any) -> None:
        """Let sums update values from the next push on: value <- update(value, sum, state). State starts fresh.

        Every rank calls it with the same arguments; a difference is an error on all.

        Args:
            optimizer: a registered name ('sgd', 'adam', ...) or an optimizer specification.
            params: its parameters, named as in MXNet: `learning_rate`, `momentum`, `wd`, `rescale_grad`, ...

        Raises:
            UnknownNameError: nobody registered that name; lists the known ones.
            ParameterError: a parameter is unknown or out of range; nothing changed.
        """

    @abstractmethod
    def set_learning_rate(
        self, learning_rate: float | None = None, multipliers: Mapping[str, float] | None = None
    ) -> None:
        """Change the optimizer's learning rate, and per-key multipliers of it, before the next round.

        Args:
            learning_rate: finite, >= 0; None leaves it.
            multipliers: key (or glob pattern of string keys) -> factor; None leaves them.

        Raises:
            ConfigError: no optimizer is set.
            ParameterError: a number is negative or not finite.
        """

    @abstractmethod
    def set_updater(self, updater: Updater | None) -> None:
        """Let `updater(key, gradient, value)` change values in place. Arrays are NumPy, of the key's shape.

        Half-precision keys show their float32 master. None: back to replacing the value.

        Raises:
            NotSupportedError: a distributed store; use `set_optimizer`.
        """

    # --- compression ----------------------------------------------------------------------------------------------

    @abstractmethod
    def set_gradient_compression(
        self, params: Mapping[str, Any], per_key: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Compress what is pushed, from the next push on. Every rank calls it with the same arguments.

        Args:
            params: {'type': '2bit', 'threshold': '0.5'}: the codec's name and parameters, as strings or values.
            per_key: glob pattern -> params; the first match wins; {'type': 'none'} sends those keys raw.

        Residuals are kept over changes of the setting, so no gradient is lost.

        Raises:
            NotSupportedError: a 'local' store; use 'device'.
            UnknownNameError: nobody registered that codec; lists the known ones, nearest first.
            ParameterError: names the parameter, what was given and what is allowed; nothing changed.
            MismatchError: the ranks gave different settings.
        """

    @abstractmethod
    def clear_gradient_compression(self, flush: bool = True) -> None:
        """Push raw again. With `flush` the residuals are added to the next push of each key, else they are dropped."""

    # --- the job --------------------------------------------------------------------------------------------------

    @abstractmethod
    def barrier(self) -> None:
        """Return when every live worker has called it and all their earlier operations are complete.

        Raises:
            PeerLostError: a worker died. OperationTimeoutError: names the ranks that are missing.
        """

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return counters since `create`.

        {'keys': {key: {'pushes', 'pulls', 'raw_bytes', 'sent_bytes', 'pulled_bytes', 'encode_seconds',
        'decode_seconds', 'wait_seconds'}}, 'servers': {rank: {'raw_bytes', 'sent_bytes'}}, 'total': the sums}.
        `raw_bytes`: the pushed arrays; `sent_bytes`: what went over the wire (between devices on a 'device' store) for
        them.
        """

    @abstractmethod
    def save(self, path: str | PathLike[str]) -> None:
        """Write values, optimizer and its state, residuals and rounds to one file (replaced whole, or not at all)."""

    @abstractmethod
    def load(self, path: str | PathLike[str]) -> None:
        """Take up what `save` wrote, also with another number of servers or workers. Runs no code from the file.

        Raises:
            CheckpointError: the file is damaged, foreign or does not fit; the state is unchanged.
        """

    @abstractmethod
    def save_optimizer_states(self, path: str | PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the optimizer's state (with step counters) and, with `dump_optimizer`, its name and parameters.

        Raises:
            ConfigError: no optimizer is set.
        """

    @abstractmethod
    def load_optimizer_states(self, path: str | PathLike[str]) -> None:
        """Take up what `save_optimizer_states` wrote.

        Raises:
            CheckpointError: as `load`. ConfigError: no optimizer is set, and the file holds none.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish what was pushed and leave the job. Later calls raise ClosedError, except `close` itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def role_to_count(role: str | None) -> Role | None:
    """Read the `role` of `num_dead_node`. Raises ParameterError."""
    roles = [str(one) for one in Role]
    if role is not None and role not in roles:
        raise ParameterError(
            f"num_dead_node: role {role!r} is none of {', '.join(roles)}",
            parameter="role", given=str(role), allowed=", ".join(roles),
        )  # fmt: skip
    return None if role is None else Role(role)
