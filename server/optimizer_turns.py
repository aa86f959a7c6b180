"""Which optimizer is installed: rank 0's n-th call installs, the other ranks' n-th calls are compared with it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.errors import ConfigError, KVStoreError, MismatchError, ProtocolError
from kvstore.messages import Key
from kvstore.optimizer import create_optimizer, spec_from_json, spec_to_json, with_learning_rate
from kvstore.server.stored import StoredKey
from kvstore.server.updates import Updates


class OptimizerTurns:
    """`current`: the installed specification as JSON, with the learning rate in force."""

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._turns: list[tuple[str, KVStoreError | None]] = []
        self.current: str | None = None

    def offer(self, rank: int, turn: int, spec: str, keys: Mapping[Key, StoredKey]) -> bool:
        """Install rank 0's optimizer, or compare; False: rank 0 has not called for this turn yet.

        Turn 0 installs what a checkpoint holds; no other rank calls for that.

        Raises:
            MismatchError: this rank's differs from rank 0's. UnknownNameError, ParameterError: see `create_optimizer`.
            ProtocolError: a call of rank 0 was left out.
            ConfigError: it needs whole arrays, and a key is already spread over several chunks.
        """
        if 0 < turn <= len(self._turns):
            theirs, error = self._turns[turn - 1]
            if error is not None:
                raise error
            if spec != theirs:
                raise MismatchError(f"set_optimizer: rank {rank} gave {spec}, rank 0 gave {theirs}", rank=rank)
            return True
        if rank != 0:
            return False
        if turn > len(self._turns) + 1:
            raise ProtocolError(f"set_optimizer: call {turn} of rank 0 came after call {len(self._turns)}", rank=rank)
        try:
            self._install(spec, keys)
        except KVStoreError as error:
            if turn:
                self._turns.append((spec, error))  # the other ranks' calls of this turn fail alike
            raise
        if turn:
            self._turns.append((spec, None))
        return True

    def _install(self, spec: str, keys: Mapping[Key, StoredKey]) -> None:
        optimizer = create_optimizer(spec_from_json(spec))
        spread = [key for key, stored in keys.items() if not stored.whole and stored.spread]
        if optimizer.whole and spread:
            raise ConfigError(
                f"optimizer {spec_from_json(spec).name!r} needs each array whole, but key {spread[0]!r} is already "
                f"spread over servers in chunks: call set_optimizer before init",
                key=spread[0],
            )
        self._updates.install(optimizer, keys.values())
        self.current = spec

    def set_learning_rate(self, learning_rate: float | None, multipliers: Mapping[str, float] | None) -> None:
        """Change the rate in force; the optimizer's state stays.

        Raises:
            ConfigError: no optimizer is set. ParameterError: a number is out of range.
        """
        if self.current is None:
            raise ConfigError("set_learning_rate: no optimizer is set on the servers; call set_optimizer first")
        spec = with_learning_rate(spec_from_json(self.current), learning_rate, multipliers)
        self._updates.optimizer = create_optimizer(spec)
        self.current = spec_to_json(spec)
