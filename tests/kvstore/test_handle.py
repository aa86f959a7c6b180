"""Handles of asynchronous calls."""

import pytest

from kvstore.errors import KeyNotInitializedError, OperationTimeoutError
from kvstore.handle import Handle, done_at_once


def test_a_pending_handle_times_out_and_may_be_waited_for_again() -> None:
    handle = Handle("pull of 'w'")
    assert not handle.done()
    with pytest.raises(OperationTimeoutError, match="pull of 'w'"):
        handle.wait(0.001)
    handle.resolve(7)
    assert handle.done()
    assert handle.wait() == handle.wait(0.0) == 7


def test_a_failed_handle_raises_in_wait_only() -> None:
    handle = Handle("push of 'w'")
    handle.fail(KeyNotInitializedError("no key 'w'", key="w"))
    assert handle.done()
    assert "failed" in repr(handle)
    for _ in range(2):
        with pytest.raises(KeyNotInitializedError):
            handle.wait()


def test_done_at_once_keeps_result_or_error() -> None:
    assert done_at_once("sum", lambda: 3).wait(0.0) == 3
    failed = done_at_once("division", lambda: 1 // 0)
    assert failed.done()
    with pytest.raises(ZeroDivisionError):
        failed.wait()
