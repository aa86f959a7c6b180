"""A worker's machine: what it learns from whom."""

from __future__ import annotations

from kvstore.config import Config
from kvstore.errors import PeerLostError, to_wire
from kvstore.machine import SCHEDULER, server_address
from kvstore.member import Member
from kvstore.messages import Failed, Failure, Gone, Role, Roster, Start
from kvstore.worker import WorkerMachine


def started(rank: int = 0) -> WorkerMachine:
    config = Config(root_uri="127.0.0.1", root_port=9, num_workers=3, num_servers=1)
    machine = WorkerMachine(config, Member(config, Role.WORKER))
    machine.start(0.0)
    machine.receive(SCHEDULER, Start(job="j", rank=rank, servers=["tcp://127.0.0.1:1"]), (), 0.0)
    return machine


def lost(role: str, rank: int) -> Failed:
    error = PeerLostError("gone", role=role, rank=rank, age=2.0)
    return Failed(failure=Failure(*to_wire(error)), sequence=7)


def test_a_loss_counts_whoever_tells_of_it_first() -> None:
    machine = started()
    machine.receive(server_address(0), lost("worker", 2), (), 1.0)
    assert machine.member.num_dead() == machine.member.num_dead(Role.WORKER) == 1
    machine.receive(SCHEDULER, Roster(gone=[Gone(Role.WORKER, 2, True, 2.5)]), (), 1.1)
    assert machine.member.num_dead() == 1
    machine.validate()


def test_a_server_cannot_declare_its_worker_dead() -> None:
    machine = started(rank=1)
    machine.receive(server_address(0), lost("worker", 1), (), 1.0)
    machine.receive(server_address(0), lost("wrong role", 1), (), 1.0)
    assert machine.member.num_dead() == 0 and machine.error is None
    machine.validate()
