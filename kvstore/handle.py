"""What an asynchronous call returns: a result, or an error, that comes later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kvstore.errors import KVStoreError, OperationTimeoutError


class Handle:
    """One asynchronous call. Made by a store, which calls `resolve` or `fail` once; safe to wait for in any thread."""

    def __init__(self, what: str) -> None:
        """`what`: the call as it should read in messages, for example "pull of 'w'"."""
        self.what = what
        self._ready = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self.done() else "pending"
        return f"<Handle {self.what}: {state}>"

    def done(self) -> bool:
        """Has the call ended, well or not? Never blocks, never raises."""
        return self._ready.is_set()

    def succeeded(self) -> bool:
        """Has the call ended well?"""
        return self.done() and self._error is None

    def wait(self, timeout: float | None = None) -> Any:
        """Return what the blocking call would return, or raise what it would raise. May be called again.

        Args:
            timeout: seconds; None leaves the deadline to the store, whose operations all have one.

        Raises:
            OperationTimeoutError: `timeout` passed first; the call goes on and may be waited for again.
        """
        if not self._ready.wait(timeout):
            raise OperationTimeoutError(f"{self.what} was not done within {timeout} s; it goes on: wait again")
        if self._error is not None:
            raise self._error.fresh() if isinstance(self._error, KVStoreError) else self._error
        return self._result

    def resolve(self, result: Any) -> None:
        """End the call with its result."""
        self._result = result
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        """End the call with an error."""
        self._error = error
        self._ready.set()


def done_at_once(what: str, call: Callable[[], Any]) -> Handle:
    """Run `call` now; the handle holds its result or its error (KVStoreError and foreign ones alike)."""
    handle = Handle(what)
    try:
        handle.resolve(call())
    except Exception as error:  # it surfaces in wait(), as the contract of the asynchronous calls says
        handle.fail(error)
    return handle
