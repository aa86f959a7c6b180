"""Operations in the background, and errors that nobody waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from kvstore.config import Config
from kvstore.dist_link import Link
from kvstore.errors import KVStoreError, OperationTimeoutError, ServerError
from kvstore.machine import SCHEDULER
from kvstore.messages import Beat, PushEntry
from kvstore.operation import Operation, Part, Push, Request
from kvstore.worker_thread import WorkerThread


class Recorder:
    """Stands for the worker thread: keeps what it is given."""

    def __init__(self) -> None:
        self.taken: list[tuple[Operation, list[Part]]] = []

    def submit(self, operation: Operation, parts: Sequence[Part]) -> None:
        self.taken.append((operation, list(parts)))

    def close(self, leave: bool = True) -> None:
        pass


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def link(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    made = Link(Config(timeout=0.1, queue_bytes=1024), cast(WorkerThread, recorder))
    monkeypatch.setattr("kvstore.dist_link.GRACE", 0.1)
    yield made
    made.close()


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
    bad.fail(ServerError("lost"))
    with pytest.raises(OperationTimeoutError, match="push"):
        link.flush()  # the other one does not end: that must not look like success
    good.part_done()
    with pytest.raises(ServerError, match="lost"):
        link.flush()
    link.flush()


def test_flush_waits_for_asynchronous_pushes_but_leaves_their_errors_to_their_handles(link: Link) -> None:
    operation, handle = link.begin("push_async", 1)
    link.leave_behind(handle, deferred=False)
    with pytest.raises(OperationTimeoutError):
        link.flush()
    operation.fail(ServerError("refused"))
    link.flush()
    with pytest.raises(ServerError):
        handle.wait(0)


def test_failed_pushes_do_not_pile_up(link: Link) -> None:
    for _ in range(100):
        operation, handle = link.begin("push", 1)
        link.leave_behind(handle)
        operation.fail(ServerError("refused"))
    assert len(link._background) <= 20


def test_unacknowledged_bytes_are_bounded(link: Link, recorder: Recorder) -> None:
    sizes: Callable[[Part], int] = lambda part: 1000  # noqa: E731
    part: Any = Push(0, PushEntry("w", 0, 1, "none"), b"x" * 1000)
    first, _ = link.begin("push", 1)
    link.feed(first, [[part]], sizes)
    link.check_room()  # 24 bytes are free
    second, handle = link.begin("push", 3)
    with pytest.raises(OperationTimeoutError, match="KVSTORE_QUEUE_BYTES"):
        link.feed(second, [[part], [part, part]], sizes)
    with pytest.raises(OperationTimeoutError):
        handle.wait(0)
    assert [operation for operation, batch in recorder.taken for _ in batch] == [first, second, second, second], (
        "a call that has begun is delivered whole"
    )
    with pytest.raises(OperationTimeoutError, match="4000 bytes"):
        link.check_room()
    assert first.on_acknowledged is not None
    for _ in range(4):
        first.on_acknowledged(1000)
    link.check_room()


def test_run_raises_what_the_operation_ended_with(link: Link, recorder: Recorder) -> None:
    class Failing(Recorder):
        def submit(self, operation: Operation, parts: Sequence[Part]) -> None:
            operation.fail(KVStoreError("no"))

    failing = Link(Config(), cast(WorkerThread, Failing()))
    with pytest.raises(KVStoreError, match="no"):
        failing.run("barrier", [request()])
    failing.close()
