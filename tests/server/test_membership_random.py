"""Membership and many members, simulated: random orders of arrival, repeats, broken connections, deaths, standstills.

The simulator calls `validate()` of both machines after every step.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from kvstore.config import Config
from kvstore.errors import JoinError
from kvstore.machine import SCHEDULER, Action, Send
from kvstore.member import Broken, Member, MemberState
from kvstore.memory_network import Faults
from kvstore.messages import Ack, Barrier, Exited, Failed, Frame, Message, Role
from kvstore.server.membership import Membership
from kvstore.simulator import Simulator
from kvstore.wire import Wire

CONFIG = Config(num_workers=3, num_servers=2, heartbeat=1.0, dead_after=6.0, timeout=60.0, retry=2.0)
EVERYBODY = [(Role.WORKER, rank) for rank in range(3)] + [(Role.SERVER, rank) for rank in range(2)]
ENDPOINT = "memory://scheduler"
ROUGH = Faults(delay=(0.001, 0.4), stall=0.02, disconnect=0.01, duplicate=0.05, silence=3.0)


class Participant:
    """As the worker's machine does: a member, and barriers that are asked for again until they are answered."""

    def __init__(self, role: Role, wanted: int | None, name: str) -> None:
        endpoint = f"memory://{name}" if role is Role.SERVER else ""
        self.member = Member(CONFIG, role, endpoint=endpoint, wanted_rank=wanted, host=name, scheduler=ENDPOINT)
        self.outcomes: dict[int, str] = {}
        self._open: Barrier | None = None
        self._asked = 0.0

    @property
    def finished(self) -> bool:
        return self.member.state is MemberState.LEFT

    def call_barrier(self, turn: int, now: float) -> list[Action]:
        assert self.member.rank is not None
        self._open = Barrier(sequence=turn + 1, rank=self.member.rank, turn=turn, timeout=30.0)
        self._asked = now
        return [Send(SCHEDULER, self._open)]

    def receive(self, sender: str, message: Message, frames: Sequence[Frame], now: float) -> Iterable[Action]:
        if self.member.concerns(message):
            return self.member.receive(message, now)
        if self._open and isinstance(message, Ack) and self._open.sequence in message.sequences:
            self._settle("done")
        elif self._open and isinstance(message, Failed) and message.sequence == self._open.sequence:
            self._settle(message.failure.error)
        return []

    def unreachable(self, to: str, now: float) -> Iterable[Action]:
        return []

    def tick(self, now: float) -> Iterable[Action]:
        actions = self.member.tick(now)
        if self._open and now - self._asked >= CONFIG.retry and self.member.state is MemberState.ACTIVE:
            self._asked = now
            actions = [*actions, Send(SCHEDULER, self._open)]
        return actions

    def validate(self) -> None:
        self.member.validate()

    def _settle(self, outcome: str) -> None:
        assert self._open
        self.outcomes[self._open.turn] = outcome
        self._open = None


class Cluster:
    """A scheduler and its participants, who arrive in random order within three seconds."""

    def __init__(self, seed: int, faults: Faults, arrivals: Sequence[tuple[Role, int]] = EVERYBODY) -> None:
        self.random = random.Random(seed)
        self.simulator = Simulator(seed, faults)
        self.simulator.add("scheduler", Membership(CONFIG, "j"), listen_as=ENDPOINT, wire=Wire("j"))
        self.participants: dict[str, Participant] = {}
        for role, rank in self.random.sample(arrivals, len(arrivals)):
            wanted = rank if self.random.random() < 0.5 else None
            self.arrive(f"{role}-{rank}", role, wanted)
            self.simulator.run(self.random.uniform(0.0, 0.6))

    def arrive(self, name: str, role: Role, wanted: int | None) -> Participant:
        participant = self.participants[name] = Participant(role, wanted, name)
        self.simulator.add(name, participant)
        self.simulator.call(name, lambda _: participant.member.start(self.simulator.now))
        return participant

    @property
    def scheduler(self) -> Membership:
        machine = self.simulator.machine("scheduler")
        assert isinstance(machine, Membership)
        return machine

    def wait_until_started(self, limit: float = 30.0) -> None:
        members = [participant.member for participant in self.participants.values()]
        self.simulator.run_until(lambda: all(member.rank is not None for member in members), limit, "the start")

    def barrier(self, name: str, turn: int) -> None:
        self.simulator.call(name, lambda participant: participant.call_barrier(turn, self.simulator.now))

    def leave(self, name: str) -> None:
        self.simulator.call(name, lambda participant: participant.member.leave(99, self.simulator.now))

    def workers(self) -> dict[str, Participant]:
        return {name: one for name, one in self.participants.items() if one.member.role is Role.WORKER}


@pytest.mark.parametrize("seed", range(200))
def test_random_life(seed: int) -> None:
    cluster = Cluster(seed, ROUGH)
    cluster.wait_until_started()
    ranks = {(one.member.role, one.member.rank) for one in cluster.participants.values()}
    assert ranks == set(EVERYBODY)
    assert len({tuple(one.member.servers) for one in cluster.participants.values()}) == 1
    simulator, workers = cluster.simulator, cluster.workers()

    for name, worker in workers.items():
        simulator.run(cluster.random.uniform(0.0, 2.0))
        cluster.barrier(name, 0)
        late = [other for other in workers.values() if other is not worker and other._open is None]
        assert not late or not any(other.outcomes for other in workers.values()), "answered before all had called"
    simulator.run_until(lambda: all(worker.outcomes == {0: "done"} for worker in workers.values()), 30.0, "barrier 0")

    victim = cluster.random.choice(sorted(cluster.participants))
    callers = {name: worker for name, worker in workers.items() if name != victim}
    for name in callers:
        cluster.barrier(name, 1)
    way = cluster.random.choice(["kill", "stop", "leave", "exit"])
    _remove(cluster, victim, way)
    limit = CONFIG.dead_after + 2 * CONFIG.heartbeat + 4.0  # and what the rough network adds
    expected = {(cluster.participants[victim].member.role, cluster.participants[victim].member.rank)}
    survivors = [one for name, one in cluster.participants.items() if name != victim]
    simulator.run_until(lambda: all(set(one.member.gone) == expected for one in survivors), limit, f"news of {way}")
    if victim in workers:
        outcome = "PeerLeftError" if way == "leave" else "PeerLostError"
        simulator.run_until(lambda: all(one.outcomes.get(1) == outcome for one in callers.values()), 30.0, outcome)
    else:
        assert not any(1 in one.outcomes and one.outcomes[1] != "done" for one in callers.values())
    simulator.run(20.0)
    assert all(one.member.state is MemberState.ACTIVE for one in survivors), "a survivor was declared dead"
    for name in cluster.participants:
        if name != victim:
            cluster.leave(name)
    simulator.run_until(lambda: cluster.scheduler.finished, 30.0, "the end of the scheduler")


def _remove(cluster: Cluster, victim: str, way: str) -> None:
    simulator, member = cluster.simulator, cluster.participants[victim].member
    if way == "leave":
        cluster.leave(victim)
    elif way == "stop":
        simulator.stop(victim)
    else:
        simulator.kill(victim)
    if way == "exit":
        assert member.rank is not None
        exited = Exited(role=member.role, rank=member.rank, code=1)
        simulator.call("scheduler", lambda machine: machine.receive("launcher", exited, (), simulator.now))


@pytest.mark.parametrize("seed", range(20))
def test_stopped_process_is_told_that_it_was_removed(seed: int) -> None:
    cluster = Cluster(seed, Faults())
    cluster.wait_until_started()
    victim = cluster.random.choice(sorted(cluster.participants))
    cluster.simulator.stop(victim)
    cluster.simulator.run(CONFIG.dead_after * 3)
    cluster.simulator.resume(victim)
    member = cluster.participants[victim].member
    cluster.simulator.run_until(lambda: member.state is MemberState.FAILED, 5.0, "the news")
    (error,) = [event.error for event in member.take_events() if isinstance(event, Broken)]
    assert "you were removed from the job" in error.text
    assert (error.role, error.rank) == (member.role, member.rank)


@pytest.mark.parametrize("seed", range(20))
def test_surplus_process_is_refused(seed: int) -> None:
    cluster = Cluster(seed, Faults())
    cluster.wait_until_started()
    surplus = cluster.arrive("worker-x", Role.WORKER, cluster.random.choice([None, 0, 1, 2])).member
    cluster.simulator.run(10.0)
    assert isinstance(surplus.error, JoinError)
    assert "too late" in surplus.error.text
    others = [one.member for name, one in cluster.participants.items() if name != "worker-x"]
    assert all(member.state is MemberState.ACTIVE for member in others)


@pytest.mark.parametrize("end", ["kill", "stop", "leave"])
def test_joiner_that_goes_is_replaced(end: str) -> None:
    cluster = Cluster(5, Faults(), [(Role.WORKER, 0), (Role.WORKER, 1), (Role.SERVER, 0)])
    cluster.arrive("old", Role.WORKER, 2)
    cluster.simulator.run(1.0)
    _remove(cluster, "old", end)
    del cluster.participants["old"]
    cluster.simulator.run(7.0)
    new = cluster.arrive("new", Role.WORKER, 2).member
    cluster.arrive("server-1", Role.SERVER, None)
    cluster.wait_until_started()
    assert new.rank == 2


def test_scheduler_that_dies_is_missed_by_all() -> None:
    cluster = Cluster(1, Faults())
    cluster.wait_until_started()
    cluster.simulator.kill("scheduler")
    members = [participant.member for participant in cluster.participants.values()]
    limit = CONFIG.dead_after + 2 * CONFIG.heartbeat
    cluster.simulator.run_until(lambda: all(m.state is MemberState.FAILED for m in members), limit, "the news")
    assert {(m.error.role, m.error.rank) for m in members if m.error} == {("scheduler", 0)}


def test_join_timeout_names_the_missing() -> None:
    simulator = Simulator(3)
    simulator.add("scheduler", Membership(CONFIG, "j"), listen_as=ENDPOINT, wire=Wire("j"))
    worker = Participant(Role.WORKER, 1, "w")
    simulator.add("w", worker)
    simulator.call("w", lambda _: worker.member.start(simulator.now))
    simulator.run(CONFIG.timeout + 1.0)
    assert isinstance(worker.member.error, JoinError)
    expected = "0 of 2 servers and 1 of 3 workers registered; missing: servers 0, 1; workers 0, 2"
    assert expected in worker.member.error.text
