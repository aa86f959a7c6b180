#!/usr/bin/env python3
"""Seconds from `kvstore-server launch` of one worker and one server to the worker's first pull.

    .venv/bin/python scripts/bench_start.py

Fresh processes each time, the first run not counted; exits with 1 when the median is above the bar.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

BAR = 3.0
WORKER = """
import time
import numpy as np
import kvstore
with kvstore.create("dist_sync") as kv:
    created = time.time()
    kv.init("w", np.arange(1000, dtype=np.float32))
    kv.pull("w")
    print(created, time.time())
"""


def first_pull() -> tuple[float, float]:
    """Seconds from the launch until `create` returned, and until the first pull has."""
    launch = [sys.executable, "-m", "kvstore.server", "launch", "-n", "1", "-s", "1", "--no-prefix"]
    start = time.time()
    done = subprocess.run([*launch, "--", sys.executable, "-c", WORKER], check=True, stdout=subprocess.PIPE, text=True)
    created, pulled = map(float, done.stdout.split())
    return created - start, pulled - start


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    first_pull()  # fills the page cache, compiles: not counted
    runs = [first_pull() for _ in range(arguments.repeat)]
    created, pulled = (statistics.median(column) for column in zip(*runs, strict=True))
    verdict = "ok" if pulled <= BAR else "ABOVE THE BAR"
    print(f"create {created:.2f} s, first pull {pulled:.2f} s after the launch, bar {BAR:g} s: {verdict}")
    return 0 if pulled <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
