"""Operations of a distributed store over its worker thread: start them, wait for them, remember what failed unseen."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvstore.config import Config
from kvstore.errors import KVStoreError
from kvstore.handle import Handle
from kvstore.operation import Operation, Part
from kvstore.worker_thread import Budget, WorkerThread

GRACE = 5.0
"""Seconds a caller waits beyond an operation's own deadline, which the worker's thread enforces."""
KEPT_ERRORS = 16
"""Failed pushes that are remembered at most."""


class Link:
    """For any thread. `push` operations run in the background; their errors surface in `raise_deferred`.

    `finish` and callbacks run in the worker's thread; everything else in the caller's.
    """

    def __init__(self, config: Config, thread: WorkerThread) -> None:
        self._config = config
        self._thread = thread
        self._budget = Budget(config.queue_bytes)
        self._guard = threading.Lock()
        self._background: dict[Handle, bool] = {}
        """What nobody has waited for yet; True: its error surfaces later, False: in its own `wait`."""
        self._pid = os.getpid()
        self._last_error = getattr(sys, "last_value", None)
        atexit.register(self._close_at_exit)

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

    def check_room(self) -> None:
        """Wait until a push may begin: before anything is encoded, so that giving up changes nothing.

        Raises:
            OperationTimeoutError: servers do not take what was pushed before.
        """
        self._budget.wait_for_room(time.monotonic() + self._config.timeout)

    def feed(self, operation: Operation, batches: Iterable[Sequence[Part]], sizes: Callable[[Part], int]) -> None:
        """Submit batches as they are made; waits while too many pushed bytes are not acknowledged yet.

        Once a call has begun, its rounds are counted and all of it has to be delivered: where room does not come in
        time the rest is handed over without, and the error raised at the end.
        """
        late: KVStoreError | None = None
        for batch in batches:
            ready: list[Part] = []
            for part in batch:
                if (size := sizes(part)) and not self._budget.try_take(size):
                    self._thread.submit(operation, ready)  # room comes only from what was handed over
                    ready = []
                    late = late or self._wait_for(size, operation.deadline)
                    self._budget.add(size)
                ready.append(part)
            self._thread.submit(operation, ready)
        if late is not None:
            operation.fail(late)
            raise late

    def _wait_for(self, size: int, deadline: float) -> KVStoreError | None:
        try:
            self._budget.wait_for_room(deadline, size)
        except KVStoreError as error:
            return error
        return None

    def run(self, what: str, parts: Sequence[Part]) -> None:
        """Submit and wait. Raises what the operation ended with."""
        operation, handle = self.begin(what, len(parts))
        self._thread.submit(operation, parts)
        self.wait(handle)

    def wait(self, handle: Handle) -> Any:
        """Return the handle's result, or raise its error."""
        return handle.wait(self._config.timeout + GRACE)

    def leave_behind(self, handle: Handle, deferred: bool = True) -> None:
        """Remember a push that is under way; `deferred`: nobody will wait for it, so its error surfaces later."""
        with self._guard:
            for other in [other for other in self._background if other.succeeded() or self._told_elsewhere(other)]:
                del self._background[other]
            for other in [other for other in self._background if other.done()][:-KEPT_ERRORS]:
                del self._background[other]
            self._background[handle] = deferred

    def raise_deferred(self) -> None:
        """Raise the first error of what was left behind, once; the others are of the same cause as a rule."""
        with self._guard:
            done = [handle for handle in self._background if handle.done()]
            failed = [handle for handle in done if self._background[handle] and not handle.succeeded()]
            for handle in done:
                del self._background[handle]
        for handle in failed:
            handle.wait(0)

    def flush(self) -> None:
        """Wait until every push is done. Raises the first deferred error, or that one does not end."""
        with self._guard:
            waiting = list(self._background)
        for handle in waiting:
            with contextlib.suppress(KVStoreError):
                self.wait(handle)
        for handle in waiting:
            if not handle.done():
                self.wait(handle)
        self.raise_deferred()

    def _told_elsewhere(self, handle: Handle) -> bool:
        return handle.done() and not self._background[handle]

    def close(self) -> None:
        """Leave the job."""
        self._thread.close()
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """The interpreter ends without `close`: leave if all went well, else tell the others at once."""
        if os.getpid() != self._pid:
            return
        failed = getattr(sys, "last_value", None) is not self._last_error
        with contextlib.suppress(KVStoreError):
            if not failed:
                self.flush()
        self._thread.close(leave=not failed)
