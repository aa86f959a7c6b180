#!/usr/bin/env python3
"""Time of `import kvstore` over bare Python: warm, median of several fresh processes of each, alternating.

    .venv/bin/python scripts/bench_import.py

Exits with 1 when the median is above the bar.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

BAR_MS = 150.0


def start_ms(code: str) -> float:
    """Milliseconds from starting a fresh interpreter with `code` to its end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - start) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=11)
    arguments = parser.parse_args()
    start_ms("pass")
    start_ms("import kvstore")  # the first one compiles and fills the page cache: not counted
    pairs = [(start_ms("pass"), start_ms("import kvstore")) for _ in range(arguments.repeat)]
    bare = statistics.median(pair[0] for pair in pairs)
    over = statistics.median(pair[1] for pair in pairs) - bare
    verdict = "ok" if over <= BAR_MS else "ABOVE THE BAR"
    print(f"bare python {bare:.1f} ms, import kvstore {over:.1f} ms over it, bar {BAR_MS:.0f} ms: {verdict}")
    return 0 if over <= BAR_MS else 1


if __name__ == "__main__":
    sys.exit(main())
