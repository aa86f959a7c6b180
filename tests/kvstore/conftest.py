"""A whole job within the test's process: scheduler and servers in threads over loopback, stores of all ranks."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pytest

from kvstore.addresses import advertise, bind_endpoints, split_tcp
from kvstore.config import Config, read_config
from kvstore.dist import DistStore
from kvstore.loop import Loop
from kvstore.member import Member
from kvstore.messages import Role
from kvstore.server.membership import Membership
from kvstore.server.node import ServerMachine
from kvstore.wire import Wire
from kvstore.zmq_transport import ZmqTransport

T = TypeVar("T")


class Job:
    """`stores`: one per rank, joined. `parallel` runs a function once per rank, as the processes of a job would."""

    def __init__(self) -> None:
        self.stores: list[DistStore] = []
        self.machines: list[ServerMachine] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, workers: int, servers: int, store: str, settings: dict[str, Any], average: bool) -> None:
        """Start the scheduler, the servers and the stores. Whatever of it fails, `close` ends the rest."""
        job = secrets.token_hex(4)
        found: list[int] = []
        common = {"root_uri": "127.0.0.1", "num_workers": workers, "num_servers": servers, "job": job, **settings}
        scheduler = read_config({}, ("root_uri",), role=Role.SCHEDULER, root_port=0, **common)
        self._start(partial(self._schedule, scheduler, job, found))
        self.config = read_config({}, root_port=found[0], **common)
        for number in range(servers):
            server = read_config({}, role=Role.SERVER, server_id=number, root_port=found[0], **common)
            self._start(partial(self._serve, server))
        configs = [read_config({}, worker_id=rank, root_port=found[0], **common) for rank in range(workers)]
        with ThreadPoolExecutor(workers) as pool:
            joining = [pool.submit(DistStore, store, config, average) for config in configs]
        self.stores = [future.result() for future in joining if future.exception() is None]
        for future in joining:
            future.result()  # raises what a store failed with

    def parallel(self, call: Callable[[DistStore], T]) -> list[T]:
        """Results in rank order; the first error is raised after all have ended."""
        with ThreadPoolExecutor(len(self.stores)) as pool:
            futures = [pool.submit(call, store) for store in self.stores]
        return [future.result() for future in futures]

    def errors(self, call: Callable[[DistStore], object]) -> list[Exception | None]:
        """What `call` raised on each rank."""

        def caught(store: DistStore) -> Exception | None:
            try:
                call(store)
            except Exception as error:
                return error
            return None

        return self.parallel(caught)

    def close(self) -> None:
        """End everything, whatever state it is in."""
        with ThreadPoolExecutor(max(1, len(self.stores))) as pool:
            list(pool.map(_close_quietly, self.stores))
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), thread.name

    def _start(self, target: Callable[[threading.Event], None]) -> None:
        ready = threading.Event()
        thread = threading.Thread(target=target, args=(ready,), daemon=True)
        thread.start()
        self._threads.append(thread)
        assert ready.wait(30)

    def _schedule(self, config: Config, job: str, found: list[int], ready: threading.Event) -> None:
        transport = ZmqTransport(config)
        endpoint = transport.bind(bind_endpoints(config)[0])
        found.append(int(split_tcp(endpoint)[1]))
        ready.set()
        Loop(Membership(config, job), transport, Wire(job, config.limits), tick_every=0.02).run(self._stop)
        transport.close(1.0)

    def _serve(self, config: Config, ready: threading.Event) -> None:
        transport = ZmqTransport(config)
        endpoint = advertise(config, [transport.bind(wanted) for wanted in bind_endpoints(config)])
        member = Member(config, Role.SERVER, endpoint=endpoint, wanted_rank=config.server_id)
        machine = ServerMachine(config, member)
        self.machines.append(machine)
        loop = Loop(machine, transport, Wire(config.job, config.limits), tick_every=0.02)
        loop.perform(machine.start(time.monotonic()))
        ready.set()
        loop.run(self._stop)
        transport.close(1.0)


def _close_quietly(store: DistStore) -> None:
    with contextlib.suppress(Exception):
        store.close()


@pytest.fixture
def make_job() -> Iterator[Callable[..., Job]]:
    """make_job(workers, servers, store='dist_sync', average=False, **settings) -> Job, ended after the test."""
    jobs: list[Job] = []

    def make(
        workers: int = 1, servers: int = 1, store: str = "dist_sync", *, average: bool = False, **settings: Any
    ) -> Job:
        jobs.append(Job())
        jobs[-1].start(workers, servers, store, {"timeout": 30.0, "transport": "tcp", **settings}, average)
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()
