"""Operations in the background, and errors that nobody waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from kvstore.config import Config
from kvstore.dist_link import Link
from kvstore.errors import KVStoreError, OperationTimeoutError, ServerError
from kvstore.machine import SCHEDULER
from kvstore.messages import Beat, PushEntry
from kvstore.session import Operation, Part, Push, Request
from kvstore.worker_thread import WorkerThread


class Recorder:
    """Stands for the worker thread: keeps what it is given."""

    def __init__(self) -> None:
        self.taken: list[tuple[Operation, list[Part]]] = []

    def submit(self, operation: Operation, parts: Sequence[Part]) -> None:
        self.taken.append((operation, list(parts)))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def link(recorder: Recorder) -> Link:
    return Link(Config(timeout=0.2, queue_bytes=1024), cast(WorkerThread, recorder))


def request() -> Request:
    return Request(SCHEDULER, lambda number, left: Beat())


def test_an_operation_ends_its_handle(link: Link) -> None:
    operation, handle = link.begin("pull", 2, lambda: "done")
    operation.part_done()
    assert not handle.done()
    operation.part_done()
    assert handle.wait(0) == "done"


def test_errors_of_finishing_surface_where_the_caller_waits(link: Link) -> None:
    def finish() -> None:
        raise ValueError("no such memory")

    operation, handle = link.begin("pull", 1, finish)
    operation.part_done()
    with pytest.raises(ValueError, match="no such memory"):
        handle.wait(0)


def test_no_parts_are_done_at_once(link: Link) -> None:
    assert link.begin("push", 0)[1].done()


def test_deferred_errors_are_raised_once(link: Link) -> None:
    operation, handle = link.begin("push", 1)
    link.leave_behind(handle)
    link.raise_deferred()
    operation.fail(ServerError("refused", key="w"))
    with pytest.raises(ServerError, match="refused"):
        link.raise_deferred()
    link.raise_deferred()


def test_flush_waits_for_all_and_raises_the_error(link: Link) -> None:
    good, first = link.begin("push", 1)
    bad, second = link.begin("push", 1)
    link.leave_behind(first)
    link.leave_behind(second)
    good.part_done()
    bad.fail(ServerError("lost"))
    with pytest.raises(ServerError, match="lost"):
        link.flush()
    link.flush()


def test_unacknowledged_bytes_are_bounded(link: Link, recorder: Recorder) -> None:
    sizes: Callable[[Part], int] = lambda part: 1000  # noqa: E731
    parts: list[Any] = [Push(0, PushEntry("w", 0, 1, "none"), b"x" * 1000)]
    first, _ = link.begin("push", 1)
    link.feed(first, [parts], sizes)
    second, handle = link.begin("push", 1)
    with pytest.raises(OperationTimeoutError, match="KVSTORE_QUEUE_BYTES"):
        link.feed(second, [parts], sizes)
    assert isinstance(handle.wait, Callable) and handle.done()  # type: ignore[arg-type]
    assert first.on_acknowledged is not None
    first.on_acknowledged(1000)
    third, _ = link.begin("push", 1)
    link.feed(third, [parts], sizes)
    assert [operation for operation, batch in recorder.taken if batch] == [first, third]


def test_run_raises_what_the_operation_ended_with(link: Link, recorder: Recorder) -> None:
    class Failing(Recorder):
        def submit(self, operation: Operation, parts: Sequence[Part]) -> None:
            operation.fail(KVStoreError("no"))

    failing = Link(Config(), cast(WorkerThread, Failing()))
    with pytest.raises(KVStoreError, match="no"):
        failing.run("barrier", [request()])
