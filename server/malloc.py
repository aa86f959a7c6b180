"""Settings of glibc's malloc for processes that receive many large messages.

libzmq allocates every incoming message. By default glibc maps a large one afresh and gives it back when freed: the page
faults cost more than copying the data. Keeping the memory costs some megabytes and saves them. Elsewhere: no effect.
"""

from __future__ import annotations

import ctypes
import sys

_MAPPED_ABOVE = 32 << 20  # the most that older releases of glibc accept; larger arrays still go back to the system
_KEPT = 512 << 20
_TOP_PAD = 64 << 20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8

MALLOC_ENVIRONMENT: dict[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(_MAPPED_ABOVE),
    "MALLOC_TRIM_THRESHOLD_": str(_KEPT),
    "MALLOC_TOP_PAD_": str(_TOP_PAD),
    "MALLOC_ARENA_MAX": "1",
}
"""The same settings for the environment of a child process, where they hold from its first allocation."""


def tune_malloc() -> bool:
    """Apply the settings to this process; call before any thread starts. Returns True if glibc took them."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _MAPPED_ABOVE),
        (_M_TRIM_THRESHOLD, _KEPT),
        (_M_TOP_PAD, _TOP_PAD),
        (_M_ARENA_MAX, 1),
    )
    taken = [mallopt(option, value) == 1 for option, value in settings]  # each of them, also after a refusal
    return all(taken)
