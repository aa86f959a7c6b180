"""Tuned malloc keeps freed memory: receiving large messages again and again causes no page faults."""

import ctypes
import os
import platform
import subprocess
import sys

import pytest

from kvstore.server import malloc
from kvstore.server.malloc import MALLOC_ENVIRONMENT, tune_malloc

GLIBC = platform.libc_ver()[0] == "glibc"
FAULTS = """
import ctypes, resource, sys
from kvstore.server.malloc import tune_malloc
if sys.argv[1] == "tuned":
    assert tune_malloc()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def rounds(count):
    for _ in range(count):
        blocks = [libc.malloc(4 << 20) for _ in range(4)]
        for block in blocks:
            libc.memset(block, 1, 4 << 20)
        for block in blocks:
            libc.free(block)
rounds(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
rounds(10)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str, **environment: str) -> int:
    inherited = {name: value for name, value in os.environ.items() if name not in MALLOC_ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, mode], capture_output=True, check=True, env={**inherited, **environment}
    )
    return int(done.stdout)


@pytest.mark.skipif(not GLIBC, reason="these settings are glibc's")
def test_memory_of_large_messages_is_used_again() -> None:
    assert faults("tuned") < 1000
    assert faults("plain", **MALLOC_ENVIRONMENT) < 1000
    assert faults("plain") > 10_000, "without the settings every page is mapped again and again"


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not tune_malloc()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # a C library without mallopt
    assert not malloc.tune_malloc()
