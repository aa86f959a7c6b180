"""What users of other stores ran into, over real processes: workers, servers and schedulers that die, stop or leave.

Each job runs twice: under the launcher, which sees its processes end, and started by hand, where only heartbeats tell.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvstore

if TYPE_CHECKING:  # of the prelude that every worker's script begins with
    from pathlib import Path

    FOLDER: Path = None  # type: ignore[assignment]
    caught: Any = None
    report: Any = None
    tell: Any = None
    wait_for: Any = None

HEARTBEAT, DEAD_AFTER = 0.4, 3.0
SOON = {
    "KVSTORE_HEARTBEAT": str(HEARTBEAT), "KVSTORE_DEAD_AFTER": str(DEAD_AFTER), "KVSTORE_TIMEOUT": "50",
    "KVSTORE_CHUNK_ELEMENTS": "64",
}  # fmt: skip
SLACK = 10.0  # seconds that a busy machine may take; the exact bounds are shown on simulated time
WITHIN = DEAD_AFTER + 2 * HEARTBEAT + SLACK


def train_until_error() -> Any:
    """Rounds of a key that lies on all servers, until one fails: what is known then, and what still works."""
    kv = kvstore.create("dist_sync")
    kv.init("w", np.zeros(500, np.float32))
    rounds, error = 0, None
    while error is None:
        began = time.time()
        error = caught(kv.pushpull, "w", np.ones(500, np.float32))
        rounds += 1
        if rounds == 5:
            tell(f"five{kv.rank}")
    found = {
        "error": error, "began": began, "failed": time.time(), "rounds": rounds - 1,
        "dead": [kv.num_dead_node(), *(kv.num_dead_node(role) for role in ("worker", "server", "scheduler"))],
        "barrier": caught(kv.barrier), "save": caught(kv.save, FOLDER / f"state{kv.rank}"),
        "close": caught(kv.close),
    }  # fmt: skip
    found["saved"] = (FOLDER / f"state{kv.rank}").exists()
    report(found)
    return found


def start(by_hand: Any, workers: int, servers: int) -> dict[str, Any]:
    """All processes of a job in which nobody but the scheduler watches; by name."""
    started = {"scheduler": by_hand.scheduler(workers, servers, env=SOON)}
    for rank in range(servers):
        started[f"server{rank}"] = by_hand.server(rank)
    for rank in range(workers):
        name = f"worker{rank}"
        started[name] = by_hand.worker(name, train_until_error, DMLC_WORKER_ID=str(rank))
    return started


def check_survivor(found: Any, role: str, rank: int, killed: float, within: float) -> None:
    name, text, facts = found["error"]
    assert name == "PeerLostError", found
    assert (facts["role"], facts["rank"]) == (role, rank), facts
    assert role in text and (role == "scheduler" or f"{role} {rank}" in text), text
    assert isinstance(facts["age"], float) and 0 <= facts["age"] <= within, facts
    assert found["failed"] - max(killed, found["began"]) <= within, found
    assert found["rounds"] >= 5
    assert found["dead"] == [1, role == "worker", role == "server", role == "scheduler"], found
    assert found["barrier"] is None if role == "server" else found["barrier"][0] == "PeerLostError", found


# --- R30: a dead process stalls everyone --------------------------------------------------------------------------


@pytest.mark.parametrize(("role", "rank"), [("worker", 2), ("server", 1), ("scheduler", 0)])
def test_r30_survivors_learn_who_died_under_the_launcher(run_job: Any, role: str, rank: int) -> None:
    # Workers and servers: long before their silence tells, because the launcher has seen them end.
    env = SOON if role == "scheduler" else {**SOON, "KVSTORE_DEAD_AFTER": "40"}
    with run_job.start(train_until_error, workers=3, servers=2, env=env) as job:
        for worker in range(3):
            job.wait_for(f"five{worker}")
        killed = time.time()
        job.processes(role)[rank].kill()
        result = job.finish()
    assert result.code == 128 + signal.SIGKILL, result.output
    assert f"{role}{'' if role == 'scheduler' else f' {rank}'} was killed by SIGKILL" in result.output
    for worker in (0, 1):
        check_survivor(result.results[worker], role, rank, killed, WITHIN if role == "scheduler" else SLACK + HEARTBEAT)
    if role == "worker":
        assert result.results[0]["save"] is None and result.results[0]["saved"]


@pytest.mark.parametrize(("role", "rank"), [("worker", 2), ("server", 1), ("scheduler", 0)])
def test_r30_survivors_learn_who_died_from_heartbeats(by_hand: Any, role: str, rank: int) -> None:
    started = start(by_hand, 3, 2)
    by_hand.wait_for("five0", "five1", "five2")
    killed = time.time()
    started[role if role == "scheduler" else f"{role}{rank}"].kill()
    for worker in (0, 1):
        assert by_hand.ended(started[f"worker{worker}"]) == [0]
        check_survivor(by_hand.result(f"worker{worker}"), role, rank, killed, WITHIN)
    if role == "worker":
        assert by_hand.result("worker0")["save"] is None and by_hand.result("worker0")["saved"]
        assert by_hand.ended(started["scheduler"], started["server0"], started["server1"]) == [0, 0, 0]
    if role == "scheduler":
        servers = by_hand.ended(started["server0"], started["server1"])
        assert servers == [1, 1], "a server without a scheduler ends by itself"


# --- R31: workers with different numbers of batches ---------------------------------------------------------------


def unequal_rounds() -> Any:
    kv = kvstore.create("dist_sync")
    kv.init("w", np.zeros(100, np.float32))
    wanted = 5 if kv.rank == 0 else 7
    errors: list[Any] = []
    began = time.monotonic()
    while wanted and not errors:
        wanted -= 1
        began = time.monotonic()
        errors += filter(None, [caught(kv.pushpull, "w", np.ones(100, np.float32))])
    if kv.rank == 0:
        kv.close()
        return None
    return [errors, time.monotonic() - began, wanted, kv.num_dead_node()]


def test_r31_a_worker_that_left_is_named_with_its_last_round(run_job: Any) -> None:
    errors, took, wanted, dead = run_job(unequal_rounds, workers=2, servers=2, env=SOON).results[1]
    [(name, text, facts)] = errors
    assert name == "PeerLeftError" and (facts["rank"], facts["rounds"]) == (0, 5), facts
    assert "worker 0 left after round 5" in text and "round 6" in text
    assert took < SLACK and wanted == 1 and dead == 0


# --- R35: heartbeats: false alarms, unknown culprit ---------------------------------------------------------------


def watch_a_stopped_worker() -> Any:
    kv = kvstore.create("dist_sync")
    kv.init("w", np.zeros(4, np.float32))
    kv.pushpull("w", np.ones(4, np.float32))
    tell(f"pid{kv.rank}", str(os.getpid()))
    if kv.rank == 1:  # is stopped somewhere in these
        error = None
        while error is None:
            error = caught(kv.num_dead_node, timeout=100.0)
        tell("told")
        return [error, kv.num_dead_node()]
    wait_for("stopped")
    began = time.monotonic()
    error = caught(kv.pushpull, "w", np.ones(4, np.float32))
    took = time.monotonic() - began
    dead = [kv.num_dead_node("worker"), kv.num_dead_node(timeout=3.0)]  # that of KVSTORE_DEAD_AFTER
    tell("declared")
    wait_for("told")  # the job goes on until then
    return [error, took, *dead]


def test_r35_a_stopped_worker_is_declared_dead_and_told_when_it_goes_on(by_hand: Any) -> None:
    by_hand.scheduler(2, 1, env=SOON)
    by_hand.server(0)
    workers = [by_hand.worker(f"worker{rank}", watch_a_stopped_worker, DMLC_WORKER_ID=str(rank)) for rank in range(2)]
    by_hand.wait_for("pid0", "pid1")
    workers[1].send_signal(signal.SIGSTOP)
    by_hand.tell("stopped")
    by_hand.wait_for("declared")
    workers[1].send_signal(signal.SIGCONT)
    assert by_hand.ended(*workers) == [0, 0]
    (name, text, facts), took, dead, silent = by_hand.result("worker0")
    assert name == "PeerLostError" and facts["rank"] == 1 and "worker 1" in text
    assert took <= WITHIN and DEAD_AFTER <= facts["age"] <= WITHIN
    assert dead == 1 and silent == 1
    (name, text, facts), _ = by_hand.result("worker1")
    assert name == "PeerLostError" and facts["rank"] == 1 and "you were removed from the job" in text


SLOW_RULE = """
import ctypes
from kvstore.optimizer import Optimizer, register_optimizer

@register_optimizer("slow")
class Slow(Optimizer):
    def create_state(self, n, dtype):
        return {}

    def update(self, key, shape, offset, value, grad, state, step):
        ctypes.PyDLL(None).usleep(4_500_000)  # holds Python's lock
        return value + grad
"""


def work_without_the_store() -> Any:
    import ctypes

    import slow  # type: ignore[import-not-found]  # noqa: F401

    kv = kvstore.create("dist_sync")
    kv.init("w", np.zeros(4, np.float32))
    kv.set_optimizer("slow")
    ones = np.ones(4, np.float32)
    if kv.rank == 1:
        kv.push_async("w", ones).wait()  # its part of the round is at the server
        tell("pushed")
        ctypes.PyDLL(None).usleep(4_500_000)  # a long call into C that holds Python's lock
    else:
        wait_for("pushed")
        kv.push("w", ones)  # which begins the update
        end = time.monotonic() + 4.5
        while time.monotonic() < end:  # a long computation in Python
            sum(range(1000))
    dead = [kv.num_dead_node()]
    value = kv.pull("w")
    kv.barrier()
    return [value.tolist(), *dead, kv.num_dead_node()]


def test_r35_busy_workers_and_servers_are_not_declared_dead(run_job: Any) -> None:
    """Twice KVSTORE_DEAD_AFTER: computing in Python, holding Python's lock, and a server within an update; at once."""
    env = {**SOON, "KVSTORE_HEARTBEAT": "0.25", "KVSTORE_DEAD_AFTER": "2"}
    result = run_job(work_without_the_store, workers=2, servers=1, env=env, modules={"slow": SLOW_RULE})
    assert result.ok() == [[[2.0] * 4, 0, 0]] * 2
