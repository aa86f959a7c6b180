"""What users of other stores ran into, over real processes: processes that do not end, and forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import kvstore

if TYPE_CHECKING:  # of the prelude that every worker's script begins with
    caught: Any = None
    tell: Any = None
    wait_for: Any = None

ENV = {"KVSTORE_HEARTBEAT": "0.4", "KVSTORE_DEAD_AFTER": "3", "KVSTORE_TIMEOUT": "60"}
SOON = 20.0
"""Seconds that a busy machine may take for what takes less than five on another."""


# --- R39: a process hangs at exit ---------------------------------------------------------------------------------


def end_in_some_way() -> Any:
    """Rank 0 pushes and raises, 1 ends a thread by sys.exit, 2 never closes, 3 and 4 are interrupted in a pull."""
    import threading

    kv = kvstore.create("dist_sync")
    ones = np.ones(100_000, np.float32)
    kv.init("w", ones)
    kv.pushpull("w", ones)
    if kv.rank >= 3:
        kv.push("w", ones)
        tell(f"pulling{kv.rank}", str(time.time()))
        kv.pull("w")  # which others have not pushed for
    wait_for("go")
    tell(f"ending{kv.rank}", str(time.time()))
    if kv.rank == 0:
        kv.push("w", ones)
        raise ValueError("on purpose")
    if kv.rank == 1:
        thread = threading.Thread(target=sys.exit, args=(3,))
        kv.push("w", ones)
        thread.start()
        thread.join()
    if kv.rank == 2:
        kv.push("w", ones)
    return "ended"


def test_r39_processes_end_soon_with_the_right_code(by_hand: Any) -> None:
    scheduler = by_hand.scheduler(5, 1, env=ENV)
    server = by_hand.server(0)
    workers = [by_hand.worker(f"worker{rank}", end_in_some_way, DMLC_WORKER_ID=str(rank)) for rank in range(5)]
    by_hand.wait_for("pulling3", "pulling4")
    for rank, number in ((3, signal.SIGINT), (4, signal.SIGTERM)):
        sent = time.monotonic()
        workers[rank].send_signal(number)
        assert by_hand.ended(workers[rank]) == [-number], (by_hand.folder / f"worker{rank}.output").read_text()
        assert time.monotonic() - sent < SOON
    by_hand.tell("go")
    assert by_hand.ended(*workers[:3]) == [1, 0, 0]
    now = time.time()
    for rank in range(3):
        assert now - float((by_hand.folder / f"ending{rank}").read_text()) < SOON, f"rank {rank}"
    assert "ValueError: on purpose" in (by_hand.folder / "worker0.output").read_text()
    assert by_hand.result("worker1") == by_hand.result("worker2") == "ended"
    assert by_hand.ended(server, scheduler) == [0, 0], "a job whose workers are all gone ends"


def test_r39_without_a_scheduler_the_process_ends_with_the_error() -> None:
    script = "import kvstore; kvstore.create('dist_sync', root_uri='127.0.0.1', root_port=1, num_workers=1, "
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", f"{script} num_servers=1, timeout=0.5)"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "JoinError" in done.stdout.splitlines()[-1]
    assert time.monotonic() - began < SOON


# --- R41: fork after create ---------------------------------------------------------------------------------------


def no_store() -> None:
    sum(range(1000))


def use_local_store(answers: Any) -> None:
    with kvstore.create("local") as kv:
        kv.init("w", np.ones(3, np.float32))
        kv.push("w", np.ones(3, np.float32) * 5)
        answers.put(kv.pull("w").tolist())


def fork_often() -> Any:
    import multiprocessing

    kv = kvstore.create("dist_sync")
    ones = np.ones(1000, np.float32)
    kv.init("w", ones)
    kv.push("w", ones)
    fork, exact = multiprocessing.get_context("fork"), True
    codes: list[Any] = []
    for number in range(20):
        children = [fork.Process(target=no_store) for _ in range(4)]
        for child in children:
            child.start()
        for _ in range(5):
            exact = exact and bool((kv.pushpull("w", ones * number) == number * kv.num_workers).all())
        for child in children:
            child.join(30.0)
            codes.append(child.exitcode)

    def use_inherited(answers: Any) -> None:
        answers.put([caught(kv.pull, "w"), caught(kv.push, "w", ones), caught(kv.barrier), caught(kv.close)])

    answers = fork.SimpleQueue()
    child = fork.Process(target=use_inherited, args=(answers,))
    child.start()
    inherited = answers.get()
    child.join(30.0)
    codes.append(child.exitcode)
    pid = os.fork()
    if pid == 0:
        sys.exit(0)  # runs what was registered to run at exit, unlike multiprocessing
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    exact = exact and bool((kv.pushpull("w", ones) == kv.num_workers).all())

    spawn = multiprocessing.get_context("spawn")
    queue = spawn.SimpleQueue()
    other = spawn.Process(target=use_local_store, args=(queue,))
    other.start()
    local = queue.get()
    other.join(30.0)
    codes.append(other.exitcode)
    exact = exact and bool((kv.pushpull("w", ones) == kv.num_workers).all())
    kv.close()
    return [exact, sorted(set(codes)), len(codes), inherited, local]


def test_r41_forked_children_leave_the_store_alone(run_job: Any) -> None:
    result = run_job(fork_often, workers=2, servers=1, env=ENV, uses=[no_store, use_local_store])
    for exact, codes, count, inherited, local in result.ok():
        assert exact and codes == [0] and count == 83
        for error in inherited[:3]:
            assert error[0] == "ClosedError" and "forked" in error[1]
        assert inherited[3] is None, "a child may close what it inherited: nothing happens"
        assert local == [5.0] * 3
