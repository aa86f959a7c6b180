"""The harness of the cases: results, failures, and jobs that do not end come back as results."""

from __future__ import annotations

from typing import Any

import numpy as np

import kvstore


def ones(size: int) -> Any:
    return np.ones(size, np.float32)


def summed(size: int) -> Any:
    with kvstore.create("dist_sync") as kv:
        kv.init("w", ones(size))
        kv.push("w", ones(size))
        return [kv.rank, kv.num_workers, kv.pull("w").tolist()]


def test_a_function_runs_in_every_worker(run_job: Any) -> None:
    result = run_job(summed, workers=2, servers=1, args={"size": 3}, uses=[ones])
    assert result.ok() == [[0, 2, [2.0] * 3], [1, 2, [2.0] * 3]]


def test_failures_and_endless_jobs_are_results(run_job: Any) -> None:
    failed = run_job("raise SystemExit(7)", workers=1, servers=1)
    assert failed.code == 7 and failed.results == [None]
    with run_job.start("report('here'); tell('up'); time.sleep(600)", 1, 1) as job:
        job.wait_for("up")
        job.timeout = 0.1
        endless = job.finish()
    assert endless.code is None and "stopped by SIGTERM" in endless.output and endless.results == ["here"]
