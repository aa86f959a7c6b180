"""Whole clusters whose processes die, stop, leave early, come twice or come from an older job; on simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.errors import JoinError, PeerLeftError, PeerLostError
from kvstore.machine import Action, Connect, Send
from kvstore.member import MemberState
from kvstore.memory_network import Faults
from kvstore.messages import Assign, AssignEntry, Push, PushEntry
from kvstore.wire import Wire

MakeCluster = Callable[..., Any]
ONES = np.ones(300, np.float32)
LIMIT = 6.0 + 2 * 1.0
"""dead_after and two beats."""


def begin_round(cluster: Any, ranks: list[int]) -> list[Any]:
    """These ranks push 'w' and pull it; the pulls."""
    for rank in ranks:
        cluster.workers[rank].push("w", ONES)
    return [cluster.workers[rank].pull("w")[0] for rank in ranks]


def end_with(cluster: Any, operations: list[Any], error: type[Exception], limit: float) -> list[Any]:
    """Run until all have ended, which they must within `limit` seconds and with such an error; the errors."""
    cluster.run_until(lambda: all(operation.done for operation in operations), limit, "an error")
    assert all(isinstance(operation.error, error) for operation in operations), operations
    return [operation.error for operation in operations]


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Any:
    """3 workers, 2 servers, key 'w' of 300 elements on both."""
    cluster = make_cluster(workers=3, servers=2)
    cluster.init("w", np.zeros(300, np.float32))
    return cluster


@pytest.mark.parametrize("way", ["kill", "stop"])
def test_lost_worker_is_named_to_all_who_wait_for_it(cluster: Any, way: str) -> None:
    pulls = begin_round(cluster, [0, 2])
    cluster.simulator.run(1.0)
    getattr(cluster.simulator, way)("worker-1")
    silence = Faults().silence if way == "stop" else 0.0
    for error in end_with(cluster, pulls, PeerLostError, LIMIT + silence):
        assert (error.role, error.rank) == ("worker", 1)
        assert error.age > 6.0
        assert "worker 1 was lost" in error.text and "round 1 cannot complete" in error.text
    late = begin_round(cluster, [0])
    end_with(cluster, late, PeerLostError, 1.0)


def test_what_does_not_need_the_lost_worker_goes_on(cluster: Any) -> None:
    cluster.wait(begin_round(cluster, [0, 1, 2]))
    cluster.simulator.kill("worker-1")
    cluster.simulator.run(LIMIT)
    operation, value = cluster.workers[0].pull("w")
    cluster.wait([operation])
    assert set(value) == {3.0}


@pytest.mark.parametrize("way", ["kill", "stop"])
def test_lost_server_is_named(cluster: Any, way: str) -> None:
    getattr(cluster.simulator, way)("server-1")
    operations = begin_round(cluster, [0, 1, 2])
    operations += [worker.push("w", ONES) for worker in cluster.workers]
    silence = Faults().silence if way == "stop" else 0.0
    for error in end_with(cluster, operations, PeerLostError, LIMIT + silence):
        assert (error.role, error.rank) == ("server", 1)
        assert error.age > 6.0
        assert "server 1 was lost" in error.text


def test_lost_scheduler_is_named(cluster: Any) -> None:
    cluster.simulator.kill("scheduler")
    operations = begin_round(cluster, [0, 1])
    for error in end_with(cluster, operations, PeerLostError, LIMIT):
        assert (error.role, error.rank) == ("scheduler", 0)
        assert error.age > 6.0
    late = begin_round(cluster, [2])
    end_with(cluster, late, PeerLostError, LIMIT)
    cluster.run_until(lambda: not any(map(cluster.simulator.is_alive, cluster.servers)), LIMIT, "the servers' end")


def test_worker_that_leaves_early_is_named_with_its_rounds(cluster: Any) -> None:
    cluster.wait(begin_round(cluster, [0, 1, 2]))
    cluster.workers[1].leave()
    pulls = begin_round(cluster, [0, 2])
    for error in end_with(cluster, pulls, PeerLeftError, 1.0):
        assert (error.role, error.rank, error.rounds, error.key) == ("worker", 1, 1, "w")
        assert "worker 1 left after round 1 of key 'w', so round 2 cannot complete" in error.text


def test_job_ends_when_all_workers_have_left(cluster: Any) -> None:
    cluster.wait(begin_round(cluster, [0, 1, 2]))
    for worker in cluster.workers:
        worker.leave()
    cluster.run_until(lambda: not any(map(cluster.simulator.is_alive, cluster.simulator.names)), 5.0, "the end")


def test_rank_0_that_goes_before_init_is_named(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=2, servers=1)
    waits = cluster.workers[1].init("w", ONES)
    cluster.workers[0].leave()
    (error,) = end_with(cluster, [waits], PeerLeftError, 1.0)
    assert error.text == "worker 0 left before it gave key 'w' its value"


@pytest.mark.parametrize("name", ["worker-1", "server-1", "scheduler"])
def test_stopped_process_that_goes_on_in_time_costs_nothing(cluster: Any, name: str) -> None:
    """Longer than the connections last and requests wait for an answer, shorter than what counts as death."""
    if name == "worker-1":
        pulls = begin_round(cluster, [0, 1, 2])
    cluster.simulator.stop(name)
    if name != "worker-1":
        pulls = begin_round(cluster, [0, 1, 2])
    cluster.simulator.run(5.0)
    cluster.simulator.resume(name)
    cluster.wait(pulls, 10.0)
    cluster.wait(begin_round(cluster, [0, 1, 2]), 10.0)
    assert [set(value) for value in cluster.pull_all("w")] == [{3.0}] * 3


@pytest.mark.parametrize("silence", [1.0, 100.0])
def test_repeats_while_a_server_stands_still_are_applied_once(make_cluster: MakeCluster, silence: float) -> None:
    cluster = make_cluster(workers=2, servers=2, faults=Faults(silence=silence), dead_after=60.0, retry=0.5)
    cluster.set_optimizer("test")
    cluster.init("w", np.zeros(300, np.float32))

    def train(worker: Any) -> Iterator[Any]:
        for _ in range(4):
            worker.push("w", ONES)
            yield worker.pull("w")[0]

    simulator = cluster.simulator
    for server in (0, 1):
        simulator.at(simulator.now + 0.004 + server, simulator.stop, f"server-{server}")
        simulator.at(simulator.now + 12.0 + server, simulator.resume, f"server-{server}")
    cluster.run_programs([train(worker) for worker in cluster.workers], limit=40.0)
    repeats = simulator.story(10_000).count("-> server-0 Push")
    assert repeats > 4 * 2, "the servers stood still before anything was pushed"
    assert [set(value) for value in cluster.pull_all("w")] == [{8.0}] * 2


@pytest.mark.parametrize("role", ["worker", "server"])
def test_process_that_starts_again_is_refused_by_name(cluster: Any, role: str) -> None:
    simulator, name = cluster.simulator, f"{role}-1"
    simulator.restart(name, getattr(cluster, role)(1), Wire("job"))
    simulator.call(name, lambda machine: machine.start(simulator.now))
    member = simulator.machine(name).member
    cluster.run_until(lambda: member.state is MemberState.FAILED, 5.0, "the refusal")
    assert isinstance(member.error, JoinError)
    assert (member.error.role, member.error.rank) == (role, 1)
    assert "comes too late: the job has started" in member.error.text
    assert f"{role} (host h" in member.error.text


class Leftover:
    """A worker of an older job that still sends to the servers' addresses."""

    finished = False

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def start(self) -> list[Action]:
        entry = AssignEntry("w", 0, (10,), "float32", 2, 0, True)
        return [
            Connect("server-0", "memory://server-0"),
            Connect("server-1", "memory://server-1"),
            *(Send(f"server-{server}", message, [bytes(40)])
              for server in (0, 1)
              for message in (
                  Push(sequence=1, rank=1, entries=[PushEntry("w", 0, 1, "none")]),
                  Assign(sequence=2, rank=0, entries=[entry], timeout=5.0),
              )),
        ]  # fmt: skip

    def receive(self, sender: str, message: Any, frames: Any, now: float) -> list[Action]:
        self.heard.append(message)
        return []

    def unreachable(self, to: str, now: float) -> list[Action]:
        return []

    def tick(self, now: float) -> list[Action]:
        return []


def test_leftover_of_an_older_job_is_refused_and_changes_nothing(cluster: Any) -> None:
    cluster.simulator.add("leftover", Leftover(), wire=Wire("older job"))
    cluster.simulator.call("leftover", lambda machine: machine.start())
    leftover = cluster.simulator.machine("leftover")
    cluster.run_until(lambda: len(leftover.heard) == 4, 5.0, "four refusals")
    for message in leftover.heard:
        assert message.failure.error == "ProtocolError"
        assert "message of job 'older job', this is job 'job'" in message.failure.text
    cluster.wait(begin_round(cluster, [0, 1, 2]))
    assert [set(value) for value in cluster.pull_all("w")] == [{3.0}] * 3
