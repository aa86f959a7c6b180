"""Output of many processes on one terminal: whole lines, each under the name of who wrote it."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.messages import Role

LONGEST = 1 << 16
"""Bytes of a line; a longer one is shown in pieces of this size, each under its own prefix."""

REDRAW = 1.0
"""Seconds between two shown states of a line that redraws itself by carriage returns (progress bars)."""

_PATIENCE = 0.25  # seconds a slow reader gets at a time
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


def name(role: Role, rank: int) -> str:
    """'worker 0', 'server 1', 'scheduler' (there is one)."""
    return str(role) if role is Role.SCHEDULER else f"{role} {rank}"


def prefix(role: Role, rank: int, *, colour: bool) -> bytes:
    """'worker 0 | ', in a colour of its own on terminals."""
    text = f"{name(role, rank)} | "
    if not colour:
        return text.encode()
    code = 90 if role is Role.SCHEDULER else _COLOURS[(rank + 5 * (role is Role.SERVER)) % len(_COLOURS)]
    return f"\x1b[{code}m{text}\x1b[0m".encode()


@dataclass
class Lines:
    """Cuts one stream into prefixed lines. Bytes are passed on as they are, text or not."""

    prefix: bytes
    _rest: bytes = b""
    _drawn: float = field(default=float("-inf"))

    def feed(self, data: bytes, now: float) -> bytes:
        """Return the lines that `data` completes, prefixed, each ending in a newline. `now`: seconds, monotonic."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        shown = [piece for line in whole for piece in self._line(line)]
        while len(self._rest) > LONGEST:
            shown.append(self._rest[:LONGEST])
            self._rest = self._rest[LONGEST:]
        return self._prefixed(shown + self._redrawn(now))

    def flush(self) -> bytes:
        """Return the last line, which had no newline; it gets one."""
        rest, self._rest = self._rest, b""
        return self._prefixed(list(self._line(rest))) if rest else b""

    def _line(self, line: bytes) -> list[bytes]:
        # What a terminal would show at last of a line that redraws itself.
        line = line.rstrip(b"\r").rpartition(b"\r")[2]
        return [line[start : start + LONGEST] for start in range(0, len(line), LONGEST)] or [b""]

    def _redrawn(self, now: float) -> list[bytes]:
        # The last character stays: a carriage return there may be half of a line end.
        drawn, _, rest = self._rest[:-1].rpartition(b"\r")
        if not drawn:
            return []
        self._rest = rest + self._rest[-1:]
        if now - self._drawn < REDRAW:
            return []
        self._drawn = now
        return [drawn.rpartition(b"\r")[2]]

    def _prefixed(self, lines: list[bytes]) -> bytes:
        return b"".join(self.prefix + line + b"\n" for line in lines)


class Sink:
    """Writes to a file descriptor in pieces that cannot block, so that a reader who stopped reading stops nothing else.

    `broken`: nothing more is written. `interrupted`: asked while the reader is slow; true means not to wait for it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.broken = False
        self.interrupted: Callable[[], bool] = lambda: False

    @property
    def colour(self) -> bool:
        """Does a person read this, who did not ask for plain text (NO_COLOR)?"""
        return os.isatty(self.descriptor) and not os.environ.get("NO_COLOR")

    def write(self, data: bytes) -> None:
        """Write all, waiting for a slow reader; drop what is left if it is gone, or `interrupted`."""
        view = memoryview(data)
        while view and not self.broken and self._writable():
            try:
                view = view[os.write(self.descriptor, view[: select.PIPE_BUF]) :]
            except BlockingIOError:
                continue
            except OSError:
                self.broken = True

    def _writable(self) -> bool:
        # A writable pipe takes PIPE_BUF bytes at once.
        while not select.select([], [self.descriptor], [], _PATIENCE)[1]:
            if self.interrupted():
                self.broken = True
                return False
        return True
