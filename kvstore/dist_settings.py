"""What all ranks of a job have in common: optimizer, learning rate, compression, barriers. One rank's side of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from kvstore import dist_requests as requests
from kvstore.compression.policy import CompressionPolicy, policy_to_json
from kvstore.dist_link import Link
from kvstore.errors import ConfigError
from kvstore.machine import server_address
from kvstore.messages import AskStatus, SetCompression, SetLearningRate, SetOptimizer, Status
from kvstore.operation import Request
from kvstore.optimizer import OptimizerSpec, find_optimizer, spec_from_json, spec_to_json

COMPARED_WHOLE = 1000
"""Characters of a value that travel; a longer one is compared by its digest."""


class JobSettings:
    """`compression`: the policy in force, None for raw. `whole`: the optimizer needs each key on one server."""

    def __init__(self, link: Link, rank: int, num_servers: int) -> None:
        self.compression: CompressionPolicy | None = None
        self.whole = False
        self._link = link
        self._rank = rank
        self._num_servers = num_servers
        self._has_optimizer = False
        self._turns: dict[str, int] = {}

    def set_optimizer(self, spec: OptimizerSpec) -> None:
        """Rank 0's call installs; other ranks' calls wait for that and compare."""
        turn, rank, text = self._next_turn("optimizer"), self._rank, spec_to_json(spec)

        def build(number: int, left: float) -> SetOptimizer:
            return SetOptimizer(sequence=number, rank=rank, turn=turn, spec=text, timeout=requests.less(left))

        self._link.run(f"set_optimizer({spec.name!r})", requests.to_all_servers(self._num_servers, build))
        self._has_optimizer = True
        self.whole = find_optimizer(spec.name).whole

    def set_learning_rate(self, learning_rate: float | None, multipliers: Mapping[str, float] | None) -> None:
        """Reaches every server before it returns."""
        factors = None if multipliers is None else dict(multipliers)

        def build(number: int, left: float) -> SetLearningRate:
            return SetLearningRate(sequence=number, rank=self._rank, learning_rate=learning_rate, multipliers=factors)

        self._link.run("set_learning_rate", requests.to_all_servers(self._num_servers, build))

    def set_compression(self, policy: CompressionPolicy | None) -> None:
        """Returns once every rank has called it with the same policy; rank 0 then tells the servers."""
        text = policy_to_json(policy)
        self.agree("compression", text)
        if self._rank == 0:

            def build(number: int, left: float) -> SetCompression:
                return SetCompression(sequence=number, rank=0, params=text)

            self._link.run("set_gradient_compression", requests.to_all_servers(self._num_servers, build))
        self.compression = policy

    def agree(self, topic: str, value: str) -> None:
        """Return once every rank has given the same value for its next turn of `topic`; else raise MismatchError."""
        turn = self._next_turn(topic)
        if len(value) > COMPARED_WHOLE:
            digest = hashlib.blake2b(value.encode(), digest_size=16).hexdigest()
            value = f"{value[:COMPARED_WHOLE]}... ({len(value)} characters, digest {digest})"
        self._link.run(f"agreement about {topic}", [requests.agreement(self._rank, topic, turn, value)])

    def barrier(self) -> None:
        """Return once every rank has called it as often as this one."""
        self._link.run("barrier", [requests.barrier(self._rank, self._next_turn("barrier"))])

    def check_optimizer(self, what: str) -> None:
        """Raise ConfigError unless the servers have an optimizer, whoever installed it."""
        if not self._has_optimizer and self.status(server_address(0)).optimizer is None:
            raise ConfigError(
                f"{what} on an asynchronous store needs an optimizer on the servers: call set_optimizer first",
                rank=self._rank,
            )
        self._has_optimizer = True

    def learn_optimizer(self) -> None:
        """Take up what the servers have, after somebody else installed it."""
        spec = self.status(server_address(0)).optimizer
        self._has_optimizer = spec is not None
        self.whole = spec is not None and find_optimizer(spec_from_json(spec).name).whole

    def status(self, address: str) -> Status:
        """Ask a process what it is doing."""
        found: list[Status] = []

        def build(number: int, left: float) -> AskStatus:
            return AskStatus(sequence=number)

        def answered(answer: object, frames: object) -> None:
            assert isinstance(answer, Status)
            found.append(answer)

        self._link.run(f"status of {address}", [Request(address, build, answered=answered)])
        return found[0]

    def _next_turn(self, topic: str) -> int:
        self._turns[topic] = self._turns.get(topic, 0) + 1
        return self._turns[topic]
