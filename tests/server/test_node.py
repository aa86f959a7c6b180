"""A server's machine: membership beside the shard, status for people, the end of the job, imported modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.machine import SCHEDULER, Send
from kvstore.messages import AskStatus, Beat, Leave, Status
from kvstore.server.node import ServerMachine, import_modules

MakeCluster = Callable[..., Any]


def status(machine: ServerMachine, keys: bool = False) -> Status:
    (action,) = machine.receive("tool", AskStatus(sequence=3, keys=keys), (), 0.0)
    assert isinstance(action, Send)
    assert isinstance(action.message, Status)
    assert (action.to, action.message.sequence) == ("tool", 3)
    return action.message


def test_status_tells_totals_and_keys(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=2, servers=1)
    cluster.init("w", np.zeros(100, np.float32))
    cluster.set_optimizer("test")
    for worker in cluster.workers:
        worker.push("w", np.ones(100, np.float32), type="2bit", threshold=1.0)
    cluster.pull_all("w")
    machine = cluster.simulator.machine("server-0")
    told = status(machine)
    assert (told.role, told.rank, told.job, told.num_workers, told.num_servers) == ("server", 0, "job", 2, 1)
    assert told.keys == []
    received = 2 * (16 + 12)  # two chunks of 64 and 36 elements, 2 bits each, in whole words
    assert told.totals == {
        "keys": 1,
        "elements": 100,
        "raw_bytes": 800,
        "received_bytes": received,
        "rounds": 1,
        "dropped_pushes": 0,
        "scaled_pushes": 0,
    }
    assert '"name":"test"' in str(told.optimizer)
    (key,) = status(machine, keys=True).keys
    assert (key.key, key.chunks, key.elements, key.rounds, key.raw_bytes) == ("w", 2, 100, 1, 800)


def test_status_before_the_job_has_started(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=1, servers=1)
    fresh = cluster.server(None)
    assert (status(fresh).job, status(fresh).totals["keys"]) == ("", 0)


def test_server_leaves_when_the_last_worker_has(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=2, servers=1)
    machine = cluster.simulator.machine("server-0")
    cluster.workers[0].leave()
    cluster.simulator.run(3.0)
    assert not machine.finished
    cluster.simulator.kill("worker-1")
    cluster.run_until(lambda: machine.finished, 9.0, "the server's end")
    assert machine.error is None
    assert isinstance(machine.member._leave, Leave)


def test_server_that_loses_the_scheduler_ends_with_the_error(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=1, servers=1)
    machine = cluster.simulator.machine("server-0")
    cluster.simulator.kill(SCHEDULER)
    cluster.run_until(lambda: machine.finished, 9.0, "the server's end")
    assert (machine.error.role, machine.error.rank) == ("scheduler", 0)


def test_beats_go_on(make_cluster: MakeCluster) -> None:
    machine = make_cluster(workers=1, servers=1).simulator.machine("server-0")
    assert Send(SCHEDULER, Beat()) in machine.tick(5000.0)
    assert machine.unreachable("worker-0", 5000.0) == []


def test_modules_are_imported_by_name() -> None:
    import_modules(["json", "kvstore.optimizer"])
    with pytest.raises(ConfigError, match="--import no_such_module: ModuleNotFoundError"):
        import_modules(["json", "no_such_module"])
