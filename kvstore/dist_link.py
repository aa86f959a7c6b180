"""Operations of a distributed store over its worker thread: start them, wait for them, remember what failed unseen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvstore.config import Config
from kvstore.errors import KVStoreError
from kvstore.handle import Handle
from kvstore.session import Operation, Part
from kvstore.worker_thread import Budget, WorkerThread

GRACE = 5.0
"""Seconds a caller waits beyond an operation's own deadline, which the worker's thread enforces."""


class Link:
    """For any thread. `push` operations run in the background; their errors surface in `raise_deferred`."""

    def __init__(self, config: Config, thread: WorkerThread) -> None:
        self._config = config
        self._thread = thread
        self._budget = Budget(config.queue_bytes)
        self._guard = threading.Lock()
        self._background: list[Handle] = []

    def begin(self, what: str, parts: int, finish: Callable[[], Any] | None = None) -> tuple[Operation, Handle]:
        """Make an operation of so many parts, and the handle that ends with it (with what `finish` returns)."""
        handle = Handle(what)
        now = time.monotonic()
        operation = Operation(what, now + self._config.timeout, parts, started=now)

        def on_done(done: Operation) -> None:
            try:
                if done.error is not None:
                    handle.fail(done.error)
                else:
                    handle.resolve(finish() if finish else None)
            except Exception as error:  # of writing into the caller's arrays: it surfaces where the caller waits
                handle.fail(error)

        operation.on_done = on_done
        operation.on_acknowledged = self._budget.give
        if parts == 0:
            operation.part_done()
        return operation, handle

    def feed(self, operation: Operation, batches: Iterable[Sequence[Part]], sizes: Callable[[Part], int]) -> None:
        """Submit batches as they are made; waits while too many pushed bytes are not acknowledged yet."""
        try:
            for batch in batches:
                ready: list[Part] = []
                for part in batch:
                    if (size := sizes(part)) and not self._budget.try_take(size):
                        self._thread.submit(operation, ready)  # room comes only from what was handed over
                        ready = []
                        self._budget.take(size, operation.deadline)
                    ready.append(part)
                self._thread.submit(operation, ready)
        except KVStoreError as error:
            self._thread.submit(operation, [])
            operation.fail(error)
            raise

    def run(self, what: str, parts: Sequence[Part]) -> None:
        """Submit and wait. Raises what the operation ended with."""
        operation, handle = self.begin(what, len(parts))
        self._thread.submit(operation, parts)
        self.wait(handle)

    def wait(self, handle: Handle) -> Any:
        """Return the handle's result, or raise its error."""
        return handle.wait(self._config.timeout + GRACE)

    def leave_behind(self, handle: Handle) -> None:
        """Nobody waits for this one: keep it for its error."""
        with self._guard:
            self._background = [other for other in self._background if not other.succeeded()]
            self._background.append(handle)

    def raise_deferred(self) -> None:
        """Raise the first error of what was left behind, once."""
        with self._guard:
            failed = [handle for handle in self._background if handle.done() and not handle.succeeded()]
            self._background = [handle for handle in self._background if not handle.done()]
        for handle in failed:
            handle.wait(0)

    def flush(self) -> None:
        """Wait until everything left behind is done. Raises the first error."""
        with self._guard:
            waiting = list(self._background)
        for handle in waiting:
            try:
                self.wait(handle)
            except KVStoreError:
                break
        self.raise_deferred()
