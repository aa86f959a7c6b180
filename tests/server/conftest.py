"""Stand-ins for the processes of a launch; a whole cluster of machines on simulated time; one shard."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import psutil
import pytest

from kvstore import dist_requests as requests
from kvstore.arrays import describe
from kvstore.compression.policy import RAW
from kvstore.compression.registry import parse_params
from kvstore.config import Config
from kvstore.dist_exchange import pull_parts, push_parts
from kvstore.dist_key import Destination, DistKey
from kvstore.machine import SCHEDULER, Send
from kvstore.member import Member
from kvstore.memory_network import Faults
from kvstore.messages import (
    Ack,
    Assign,
    AssignEntry,
    ChunkEntry,
    Declare,
    Declared,
    DeclareEntry,
    Failed,
    Failure,
    Frame,
    Gone,
    Key,
    Message,
    Pull,
    Push,
    PushEntry,
    Refuse,
    Role,
    SetOptimizer,
    Values,
)
from kvstore.operation import Operation, Part
from kvstore.optimizer import make_spec, spec_to_json
from kvstore.server.launch_plan import Plan
from kvstore.server.membership import Membership
from kvstore.server.node import ServerMachine
from kvstore.server.shard import Shard
from kvstore.simulator import Simulator
from kvstore.wire import Wire
from kvstore.worker import WorkerMachine

Program = Generator[Operation, None, None]

# The scheduler tells its port and ends on a message; a server ends with the scheduler. DRAIN: they never do.
STAND_IN = """
import os, socket, signal, sys
if sys.argv[1] == "scheduler":
    listener = socket.create_server(("127.0.0.1", 0))
    os.write(int(sys.argv[-1]), b"tcp://127.0.0.1:%d\\n" % listener.getsockname()[1])
    kept = []
    while True:
        connection = listener.accept()[0]
        kept.append(connection)
        if connection.recv(1) == b"x":
            break
else:
    try:
        connection = socket.create_connection(("127.0.0.1", int(os.environ["DMLC_PS_ROOT_PORT"])))
        connection.send(b"s")
        connection.recv(1)
    except OSError:
        pass  # the scheduler has ended already
"""


def _stand_in(role: str) -> tuple[str, ...]:
    return sys.executable, "-c", STAND_IN, role


def _plan(program: str, *arguments: str, **settings: Any) -> Plan:
    defaults: dict[str, Any] = {
        "workers": 2,
        "servers": 1,
        "grace": 0.3,
        "scheduler": _stand_in("scheduler"),
        "server": _stand_in("server"),
        "job": secrets.token_hex(8),
    }
    return Plan(command=(sys.executable, "-c", program, *arguments), **{**defaults, **settings})


def _living(job: str) -> list[psutil.Process]:
    """Processes that carry the job's mark, zombies excepted."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("KVSTORE_JOB") == job:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    """(program text, *arguments, **fields of Plan) to a plan of 2 workers and 1 server over the stand-ins."""
    return _plan


@pytest.fixture
def living() -> Callable[[str], list[psutil.Process]]:
    """Job id to the processes of that job that live, found without the code under test."""
    return _living


class Worker:
    """One worker of a simulated cluster: offers operations as a store does. The calls return at once."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster = cluster
        self.rank = rank
        self.keys: dict[Key, DistKey] = {}
        self.turn = 0
        self.ended = False

    @property
    def name(self) -> str:
        return f"worker-{self.rank}"

    def init(self, key: Key, value: Any, epoch: int = 1, whole: bool = False) -> Operation:
        """Rank 0 gives the value, the others wait for it; `epoch` above 1 is a broadcast."""
        config, old = self.cluster.config, self.keys.get(key)
        new = self.keys[key] = DistKey(
            key, describe(value, key), config.chunk_elements, config.num_servers, self.rank, whole,
            -1 if config.staleness is None else config.staleness, config.on_stale, epoch=epoch,
        )  # fmt: skip
        new.round = old.round if old else 0
        if self.rank == 0:
            flat = np.asarray(value).reshape(-1)
            sync, average = self.cluster.sync, self.cluster.average
            parts = list(requests.assignments([(new, flat)], sync, average, config.message_bytes))
        else:
            pairs = [(new, server) for server in sorted(new.servers)]
            parts = requests.declarations(pairs, self.cluster.sync, self.cluster.average, lambda *learnt: None)
        return self.submit(f"init of {key!r}", parts)

    def push(self, key: Key, gradient: Any, priority: int = 0, **codec: Any) -> Operation:
        one = self.keys[key]
        prepared = one.encoder.prepare(gradient, parse_params(codec) if codec else RAW, one.round + 1)
        parts = [part for batch in push_parts([(one, prepared)], None, priority, True) for part in batch]
        return self.submit(f"push of {key!r}", parts)

    def pull(self, key: Key, priority: int = 0) -> tuple[Operation, Any]:
        """The operation, and the flat array that is filled when it is done."""
        one = self.keys[key]
        destination = Destination(one, [])
        return self.submit(f"pull of {key!r}", pull_parts([one], [destination], priority)), destination.flat

    def set_optimizer(self, name: str, **params: Any) -> Operation:
        self.turn += 1
        turn, spec = self.turn, spec_to_json(make_spec(name, **params))

        def build(number: int, left: float) -> Message:
            return SetOptimizer(sequence=number, rank=self.rank, turn=turn, spec=spec, timeout=left * 0.9)

        return self.submit("set_optimizer", requests.to_all_servers(self.cluster.config.num_servers, build))

    def barrier(self, turn: int) -> Operation:
        return self.submit("barrier", [requests.barrier(self.rank, turn)])

    def submit(self, what: str, parts: Sequence[Part]) -> Operation:
        simulator = self.cluster.simulator
        operation = Operation(what, simulator.now + self.cluster.config.timeout, len(parts), started=simulator.now)
        simulator.call(self.name, lambda machine: machine.submit(operation, parts, simulator.now))
        return operation

    def leave(self) -> None:
        self.cluster.simulator.call(self.name, lambda machine: machine.leave(self.cluster.simulator.now))


class Cluster:
    """Scheduler, servers and workers, started and complete."""

    def __init__(
        self,
        seed: int = 0,
        workers: int = 2,
        servers: int = 2,
        faults: Faults | None = None,
        sync: bool = True,
        average: bool = False,
        **settings: Any,
    ) -> None:
        small: dict[str, Any] = {
            "heartbeat": 1.0, "dead_after": 6.0, "timeout": 60.0, "retry": 2.0, "chunk_elements": 64,
            "message_bytes": 1024, "credit_bytes": 1024,
        }  # fmt: skip
        self.config = Config(num_workers=workers, num_servers=servers, **{**small, **settings})
        self.sync, self.average = sync, average
        self.simulator = Simulator(seed, faults)
        self.simulator.add(SCHEDULER, Membership(self.config, "job"), listen_as="memory://scheduler", wire=Wire("job"))
        self.servers = [f"server-{rank}" for rank in range(servers)]
        self.workers = [Worker(self, rank) for rank in range(workers)]
        for rank, name in enumerate(self.servers):
            self.add(name, self.server(rank), f"memory://{name}")
        for worker in self.workers:
            self.add(worker.name, self.worker(worker.rank))
        self.run_until(lambda: all(self.session(worker.name) for worker in self.workers), 60.0, "the start")

    def server(self, rank: int | None) -> ServerMachine:
        endpoint = f"memory://server-{rank}"
        member = Member(
            self.config, Role.SERVER, endpoint=endpoint, wanted_rank=rank, host="h", scheduler="memory://scheduler"
        )
        return ServerMachine(self.config, member)

    def worker(self, rank: int | None) -> WorkerMachine:
        member = Member(self.config, Role.WORKER, wanted_rank=rank, host="h", scheduler="memory://scheduler")
        return WorkerMachine(self.config, member)

    def add(self, name: str, machine: ServerMachine | WorkerMachine, listen_as: str | None = None) -> None:
        self.simulator.add(name, machine, listen_as=listen_as, wire=Wire("job"))
        self.simulator.call(name, lambda one: one.start(self.simulator.now))

    def session(self, name: str) -> Any:
        return self.simulator.machine(name).session

    def run_until(self, predicate: Callable[[], bool], limit: float = 60.0, what: str = "") -> None:
        self.simulator.run_until(predicate, limit, what)

    def wait(self, operations: Sequence[Operation], limit: float = 60.0) -> None:
        """Run until all operations have ended; raises the first error of one."""
        names = ", ".join(sorted({operation.what for operation in operations}))
        self.run_until(lambda: all(operation.done for operation in operations), limit, f"the end of {names}")
        for operation in operations:
            if operation.error is not None:
                raise operation.error

    def init(self, key: Key, value: Any, epoch: int = 1, whole: bool = False) -> None:
        """On all workers; they have it when this returns."""
        self.wait([worker.init(key, value, epoch, whole) for worker in self.workers])

    def set_optimizer(self, name: str, **params: Any) -> None:
        self.wait([worker.set_optimizer(name, **params) for worker in self.workers])

    def pull_all(self, key: Key) -> list[Any]:
        """Each worker's pulled value, flat."""
        pulls = [worker.pull(key) for worker in self.workers]
        self.wait([operation for operation, _ in pulls])
        return [value for _, value in pulls]

    def run_programs(self, programs: Sequence[Program], limit: float = 300.0) -> None:
        """Run each worker's program at once; a program yields the operation that it waits for."""
        for worker, program in zip(self.workers, programs, strict=True):
            self.simulator.clock.after(0.0, self._go_on, worker, program)
        self.run_until(lambda: all(worker.ended for worker in self.workers), limit, "the end of all programs")

    def _go_on(self, worker: Worker, program: Program) -> None:
        operation = next(program, None)
        if operation is None:
            worker.ended = True
            return
        clock = self.simulator.clock
        operation.on_done = lambda _: clock.after(0.0, self._go_on, worker, program)
        if operation.done:
            operation.on_done(operation)


@pytest.fixture
def make_cluster() -> type[Cluster]:
    """Make a started `Cluster`: (seed, workers, servers, faults, sync, average, **settings)."""
    return Cluster


class ShardHarness:
    """A shard of two workers, whose node ids are 'w0' and 'w1'; what it sends, as short lines."""

    def __init__(self) -> None:
        self.shard = Shard(Config(num_workers=2, num_servers=1, chunk_elements=64, message_bytes=1024), 2)
        self.now = 100.0
        self.sequence = 0

    def send(self, rank: int, message: Message, *frames: Any) -> list[str]:
        data: list[Frame] = [frame if isinstance(frame, bytes) else np.asarray(frame).tobytes() for frame in frames]
        actions = self.shard.receive(f"w{rank}", message, data, self.now)
        self.shard.validate()
        return _sent(actions)

    def next(self) -> int:
        self.sequence += 1
        return self.sequence

    def assign(self, key: str, value: Any, rank: int = 0, chunk: int = 0, **facts: Any) -> list[str]:
        array = np.asarray(value)
        part = array.reshape(-1)[chunk * 64 : chunk * 64 + 64]
        given = {"epoch": 1, "round": 0, "sync": True, **facts}
        entry = AssignEntry(key, chunk, array.shape, array.dtype.name, **given)
        return self.send(rank, Assign(sequence=self.next(), rank=rank, entries=[entry], timeout=10.0), part)

    def declare(self, rank: int, key: str, shape: tuple[int, ...] = (2,), **facts: Any) -> list[str]:
        given: dict[str, Any] = {"dtype": "float32", "epoch": 1, "sync": True, **facts}
        entry = DeclareEntry(key, shape, **given)
        return self.send(rank, Declare(sequence=self.next(), rank=rank, entries=[entry], timeout=10.0))

    def push(self, rank: int, key: str, number: int, value: Any, codec: str = "none", **meta: Any) -> list[str]:
        message = Push(sequence=self.next(), rank=rank, entries=[PushEntry(key, 0, number, codec, meta)])
        return self.send(rank, message, value)

    def pull(self, rank: int, key: str, number: int, timeout: float = 10.0, epoch: int = 1) -> list[str]:
        entry = ChunkEntry(key, 0, number, epoch)
        return self.send(rank, Pull(sequence=self.next(), rank=rank, entries=[entry], timeout=timeout))

    def refuse(self, rank: int, key: str, number: int) -> list[str]:
        failure = Failure("NonFiniteError", f"rank {rank} has NaN", {"key": key, "rank": rank})
        return self.send(rank, Refuse(sequence=self.next(), rank=rank, rounds=[(key, number)], failure=failure))

    def set_optimizer(self, rank: int, name: str, turn: int = 1, **params: Any) -> list[str]:
        spec = spec_to_json(make_spec(name, **params))
        return self.send(rank, SetOptimizer(sequence=self.next(), rank=rank, turn=turn, spec=spec, timeout=10.0))

    def stored_keys(self) -> list[Any]:
        return [status.key for status in self.shard.keys()]  # noqa: SIM118

    def tick(self, now: float) -> list[str]:
        self.now = now
        return _sent(self.shard.tick(now))

    def gone(self, rank: int, lost: bool = True) -> list[str]:
        return _sent(self.shard.peer_gone(Gone(Role.WORKER, rank, lost, 15.0)))


def _sent(actions: Sequence[Any]) -> list[str]:
    """'w0 ack 3'; 'w1 w@2 [1, 2]' for float32 values; 'w0 failed 3: ErrorName text'."""
    found = []
    for action in actions:
        assert isinstance(action, Send)
        match action.message:
            case Ack(sequences=sequences):
                found.append(f"{action.to} ack {sequences[0]}")
            case Values(entries=entries):
                for entry, frame in zip(entries, action.frames, strict=True):
                    if memoryview(frame).nbytes % 4:  # a value of another dtype
                        frame = b""
                    found.append(f"{action.to} {entry.key}@{entry.round} {np.frombuffer(frame, np.float32).tolist()}")
            case Failed(sequence=sequence, failure=failure):
                found.append(f"{action.to} failed {sequence}: {failure.error} {failure.text}")
            case Declared(sequence=sequence, whole=whole):
                found.append(f"{action.to} declared {sequence} {whole}")
            case message:
                found.append(f"{action.to} {type(message).__name__}")
    return found


@pytest.fixture
def make_shard() -> type[ShardHarness]:
    """Make a `ShardHarness`, a server's shard for two workers with nothing in it."""
    return ShardHarness
