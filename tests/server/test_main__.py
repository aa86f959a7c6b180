"""`python -m kvstore.server` is the command."""

from __future__ import annotations

import subprocess
import sys


def test_module_runs_as_the_command() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "kvstore.server", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.startswith("Usage: kvstore-server ")
