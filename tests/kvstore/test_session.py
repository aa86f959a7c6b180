"""Operations and their parts: order between pushes and pulls of a chunk, answers, failures, deadlines, lost servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvstore.config import Config
from kvstore.errors import KVStoreError, OperationTimeoutError, PeerLostError, ProtocolError, to_wire
from kvstore.machine import SCHEDULER, Action, Send
from kvstore.messages import (
    Ack,
    AskStatus,
    Barrier,
    Beat,
    ChunkEntry,
    Failed,
    Failure,
    Frame,
    Message,
    PushEntry,
    Values,
)
from kvstore.messages import Pull as PullMessage
from kvstore.messages import Push as PushMessage
from kvstore.operation import Operation, Part, Pull, Push, Request
from kvstore.session import Session

CONFIG = Config(num_workers=2, num_servers=2, message_bytes=1024, credit_bytes=2048, retry=5.0, timeout=60.0)
LOST = PeerLostError("server 0 was lost", role="server", rank=0, age=15.0)


class Harness:
    """A session of rank 1 with two servers, and operations by name."""

    def __init__(self) -> None:
        self.session = Session(CONFIG, 1, 2)
        self.operations: dict[str, Operation] = {}
        self.released: list[int] = []
        self.frames: list[list[Frame]] = []
        self.now = 0.0

    def submit(self, name: str, *parts: Part, deadline: float = 60.0, more: int = 0) -> list[tuple[str, str]]:
        operation = Operation(name, deadline, len(parts) + more, started=self.now)
        operation.on_acknowledged = self.released.append
        self.operations[name] = operation
        return self.sent(self.session.submit(operation, parts, self.now))

    def receive(self, sender: str, message: Message, frames: Sequence[Frame] = ()) -> list[tuple[str, str]]:
        return self.sent(self.session.receive(sender, message, frames, self.now))

    def tick(self, now: float) -> list[tuple[str, str]]:
        self.now = now
        return self.sent(self.session.tick(now))

    def sent(self, actions: Sequence[Action]) -> list[tuple[str, str]]:
        self.session.validate()
        self.frames += [list(action.frames) for action in actions if isinstance(action, Send)]
        return [line for action in actions for line in _lines(action)]

    def error(self, name: str) -> KVStoreError | None:
        assert self.operations[name].done
        return self.operations[name].error


def _lines(action: Action) -> list[tuple[str, str]]:
    """('server-0', 'push a#0@1'): key, chunk, round."""
    assert isinstance(action, Send)
    match action.message:
        case PushMessage(entries=entries):
            return [(action.to, f"push {entry.key}#{entry.chunk}@{entry.round}") for entry in entries]
        case PullMessage(entries=entries):
            return [(action.to, f"pull {entry.key}#{entry.chunk}@{entry.round}") for entry in entries]
        case message:
            return [(action.to, type(message).__name__)]


def push(key: str, number: int, size: int = 8, server: int = 0, chunk: int = 0, priority: int = 0) -> Push:
    return Push(server, PushEntry(key, chunk, number, "none"), bytes(size), priority)


def pull(key: str, number: int, size: int = 8, server: int = 0, chunk: int = 0, priority: int = 0) -> Pull:
    return Pull(server, ChunkEntry(key, chunk, number, 1), np.zeros(size, np.uint8), priority)


def values(key: str, number: int, size: int = 8, chunk: int = 0) -> tuple[Values, list[Frame]]:
    return Values(entries=[ChunkEntry(key, chunk, number, 1)]), [bytes([number]) * size]


def failed(sequence: int | None, *entries: ChunkEntry, error: KVStoreError = LOST) -> Failed:
    return Failed(failure=Failure(*to_wire(error)), sequence=sequence, entries=list(entries))


def test_push_is_done_when_acknowledged() -> None:
    harness = Harness()
    assert harness.submit("push", push("a", 1), push("a", 1, server=1, chunk=1)) == [
        ("server-0", "push a#0@1"),
        ("server-1", "push a#1@1"),
    ]
    harness.receive("server-0", Ack(sequences=[1]))
    assert not harness.operations["push"].done
    harness.receive("server-0", Ack(sequences=[1]))
    harness.receive("server-0", Ack(sequences=[2]))
    assert not harness.operations["push"].done, "server 0 cannot acknowledge what server 1 was sent"
    harness.receive("server-1", Ack(sequences=[2]))
    assert harness.error("push") is None
    assert harness.released == [8, 8]
    assert harness.session.idle()


def test_pull_fills_its_target() -> None:
    harness = Harness()
    part = pull("a", 3)
    harness.submit("pull", part)
    harness.receive("server-0", *values("a", 2))
    harness.receive("server-1", *values("a", 3))
    assert not part.target.any(), "another round, another server"
    harness.receive("server-0", *values("a", 3))
    assert harness.error("pull") is None
    assert part.target.tolist() == [3] * 8


def test_empty_values() -> None:
    harness = Harness()
    harness.submit("pull", pull("empty", 1, size=0))
    harness.receive("server-0", *values("empty", 1, size=0))
    assert harness.error("pull") is None


@pytest.mark.parametrize("size", [0, 4, 16])
def test_values_of_the_wrong_size_fail_their_pull_alone(size: int) -> None:
    harness = Harness()
    bad, good = pull("bad", 1), pull("good", 1)
    harness.submit("bad", bad)
    harness.submit("good", good)
    harness.receive("server-0", *values("bad", 1, size))
    error = harness.error("bad")
    assert isinstance(error, ProtocolError)
    assert error.text == f"chunk 0 of key 'bad' came with {size} bytes, expected are 8"
    assert not bad.target.any()
    harness.receive("server-0", *values("good", 1))
    assert harness.error("good") is None


@pytest.mark.parametrize(
    ("sender", "message", "frames"),
    [
        ("server-0", Values(entries=[ChunkEntry("a", 0, 1, 1)]), []),
        ("server-7", Values(entries=[]), []),
        ("scheduler", Values(entries=[]), []),
        ("server-0", Beat(), []),
        ("server-0", PullMessage(sequence=1, rank=0, entries=[], timeout=1.0), []),
    ],
)
def test_what_no_server_sends_is_refused(sender: str, message: Message, frames: list[Frame]) -> None:
    harness = Harness()
    part = pull("a", 1)
    harness.submit("pull", part)
    with pytest.raises(ProtocolError):
        harness.receive(sender, message, frames)
    harness.session.validate()
    assert not harness.operations["pull"].done


# --- order ------------------------------------------------------------------------------------------------------------


def test_push_waits_for_the_pull_before_it_and_for_no_other_chunk() -> None:
    harness = Harness()
    assert harness.submit("pull", pull("a", 1)) == [("server-0", "pull a#0@1")]
    assert harness.submit("push", push("a", 2), push("a", 2, chunk=1), push("b", 1)) == [
        ("server-0", "push a#1@2"),
        ("server-0", "push b#0@1"),
    ]
    assert harness.receive("server-0", *values("a", 1)) == [("server-0", "push a#0@2")]


def test_pipelined_rounds_do_not_wait_for_their_own_pull() -> None:
    """A push waited for a pull that waited for that push."""
    harness = Harness()
    assert harness.submit("first", push("a", 1), pull("a", 1)) == [
        ("server-0", "push a#0@1"),
        ("server-0", "pull a#0@1"),
    ]
    assert harness.submit("second", push("a", 2), pull("a", 2)) == [("server-0", "pull a#0@2")]
    assert harness.submit("third", push("a", 3), pull("a", 3)) == [("server-0", "pull a#0@3")]
    assert harness.receive("server-0", *values("a", 1)) == [("server-0", "push a#0@2")]
    assert harness.receive("server-0", *values("a", 2)) == [("server-0", "push a#0@3")]


def test_push_waits_for_every_pull_of_an_earlier_round() -> None:
    harness = Harness()
    harness.submit("one", pull("a", 1))
    harness.submit("two", pull("a", 1), push("b", 1))
    assert harness.submit("push", push("a", 2)) == []
    assert harness.receive("server-0", *values("a", 1)) == [("server-0", "push a#0@2")], "one value answers both"


def test_push_goes_when_the_pull_before_it_fails() -> None:
    harness = Harness()
    harness.submit("pull", pull("a", 1))
    harness.submit("push", push("a", 2))
    assert harness.receive("server-0", failed(1, ChunkEntry("a", 0, 1, 1))) == []
    assert harness.tick(0.1) == [("server-0", "push a#0@2")]


def test_a_deadline_ends_the_wait_for_a_push_not_its_delivery() -> None:
    """A dropped push left its round open for ever, on all ranks."""
    harness = Harness()
    harness.submit("pull", pull("a", 1))
    harness.submit("push", push("a", 2), deadline=1.0)
    harness.submit("next", push("a", 3))
    harness.tick(1.0)
    assert isinstance(harness.error("push"), OperationTimeoutError)
    assert harness.released == []
    assert harness.receive("server-0", *values("a", 1)) == [("server-0", "push a#0@2"), ("server-0", "push a#0@3")]
    harness.receive("server-0", Ack(sequences=[2]))
    assert sum(harness.released) == 16, "what is delivered counts no longer"


def test_what_is_still_to_be_delivered_is_copied_before_its_caller_is_told() -> None:
    harness = Harness()
    gradient = bytearray(b"12345678")
    harness.submit("pull", pull("a", 1))
    part = Push(0, PushEntry("a", 0, 2, "none"), memoryview(gradient), borrowed=True)
    harness.submit("push", part, deadline=1.0)
    harness.tick(1.0)
    gradient[:] = b"xxxxxxxx"
    harness.receive("server-0", *values("a", 1))
    assert [bytes(frame) for frame in harness.frames[-1]] == [b"12345678"]


def test_larger_priority_is_sent_first() -> None:
    harness = Harness()
    parts = [push(key, 1, 2000, priority=priority) for key, priority in (("a", 0), ("b", 1), ("c", 2))]
    assert harness.submit("all", *parts) == [("server-0", "push c#0@1")]
    assert harness.receive("server-0", Ack(sequences=[1])) == [("server-0", "push b#0@1")]


def test_pushes_never_exceed_their_credit() -> None:
    harness = Harness()
    sent = harness.submit("many", *[push("a", 1, 700, chunk=chunk) for chunk in range(10)])
    sequence, under_way, total = 0, len(sent), len(sent)
    while under_way:
        assert under_way * 700 <= 2048
        sequence += 1
        new = harness.receive("server-0", Ack(sequences=[sequence]))
        total, under_way = total + len(new), under_way + len(new) - 1
    assert total == 10
    assert harness.error("many") is None


def test_pull_without_credit_goes_after_some_ticks_without_an_answer() -> None:
    harness = Harness()
    harness.submit("waits", pull("a", 1, 2048))
    assert harness.submit("later", pull("b", 0, 2048)) == []
    assert harness.tick(0.1) == [("server-0", "pull b#0@0")]


# --- requests ---------------------------------------------------------------------------------------------------------


def test_request_is_repeated_with_its_number_and_the_seconds_left() -> None:
    harness = Harness()
    built: list[tuple[int, float]] = []

    def build(number: int, left: float) -> Message:
        built.append((number, left))
        return Barrier(sequence=number, rank=1, turn=1, timeout=left)

    assert harness.submit("barrier", Request(SCHEDULER, build)) == [(SCHEDULER, "Barrier")]
    assert [second for second in range(1, 40) if harness.tick(float(second))] == [5, 15, 35]
    assert built == [(1, 60.0), (1, 55.0), (1, 45.0), (1, 25.0)]
    harness.receive(SCHEDULER, Ack(sequences=[1]))
    assert harness.error("barrier") is None
    assert harness.tick(59.0) == []


def test_request_hears_its_answer_once() -> None:
    harness = Harness()
    heard: list[Any] = []
    request = Request("server-1", lambda n, left: AskStatus(sequence=n), answered=lambda *answer: heard.append(answer))
    harness.submit("status", request)
    for _ in range(2):
        harness.receive("server-1", Ack(sequences=[1]))
    assert heard == [(Ack(sequences=[1]), ())]


def test_failed_request() -> None:
    harness = Harness()
    harness.submit("status", Request("server-1", lambda number, left: AskStatus(sequence=number)))
    harness.receive("server-1", failed(99))
    harness.receive(SCHEDULER, failed(98))
    assert not harness.operations["status"].done
    harness.receive("server-1", failed(1))
    error = harness.error("status")
    assert isinstance(error, PeerLostError)
    assert (error.text, error.role, error.rank, error.age) == ("server 0 was lost", "server", 0, 15.0)


# --- failures ---------------------------------------------------------------------------------------------------------


def test_failure_names_the_chunks_that_it_hits() -> None:
    harness = Harness()
    harness.submit("hold", push("z", 1, 2048))
    harness.submit("bad", push("a", 1))
    harness.submit("good", push("b", 1))
    assert harness.receive("server-0", Ack(sequences=[1])) == [("server-0", "push a#0@1"), ("server-0", "push b#0@1")]
    harness.receive("server-0", failed(2, ChunkEntry("a", 0, 1, 0)))
    assert isinstance(harness.error("bad"), PeerLostError)
    assert not harness.operations["good"].done
    harness.receive("server-0", Ack(sequences=[2]))
    assert harness.error("good") is None


def test_one_failed_part_ends_the_operation_but_its_pushes_are_delivered() -> None:
    harness = Harness()
    harness.submit("all", push("a", 1, 2048), push("b", 1, 2048), pull("c", 1, server=1))
    assert harness.submit("behind", push("c", 2, server=1)) == []
    assert harness.receive("server-0", failed(1)) == []
    assert isinstance(harness.error("all"), PeerLostError)
    assert harness.tick(0.1) == [("server-1", "push c#0@2")]
    assert harness.receive("server-0", Ack(sequences=[1])) == [("server-0", "push b#0@1")]
    assert harness.released == [2048]


def test_deadline_names_who_has_not_answered_and_why() -> None:
    harness = Harness()
    harness.now = 100.0
    harness.submit("pull of key 'a'", pull("a", 1), pull("b", 1, server=1), deadline=110.0)
    harness.receive("server-1", failed(None, error=ProtocolError("message of job 'x', this is job 'y'")))
    harness.tick(109.9)
    assert not harness.operations["pull of key 'a'"].done
    harness.tick(110.0)
    error = harness.error("pull of key 'a'")
    assert isinstance(error, OperationTimeoutError)
    assert error.text == (
        "pull of key 'a' did not finish within 10.0 s: no answer yet from server-0, server-1; server-1 refused a "
        "message: message of job 'x', this is job 'y' (KVSTORE_TIMEOUT sets the limit; `kvstore-server status` shows "
        "who is in)"
    )
    assert harness.session.idle()


def test_lost_server_ends_what_waits_for_it_now_and_later() -> None:
    harness = Harness()
    harness.submit("push 0", push("a", 1))
    harness.submit("both", pull("a", 1), pull("a", 1, server=1, chunk=1))
    harness.submit("behind", push("a", 2))
    harness.submit("ask 0", Request("server-0", lambda number, left: AskStatus(sequence=number)))
    harness.submit("push 1", push("b", 1, server=1))
    harness.session.fail_server(0, LOST)
    harness.session.validate()
    for name in ("push 0", "both", "behind", "ask 0"):
        assert harness.error(name) is LOST, name
    assert harness.submit("late", push("a", 3), pull("a", 3)) == []
    assert harness.error("late") is LOST
    assert harness.released == [8, 8, 8]
    assert not harness.operations["push 1"].done
    harness.receive("server-1", Ack(sequences=[5]))
    assert harness.error("push 1") is None


def test_push_freed_by_a_lost_server_goes_at_the_next_tick() -> None:
    harness = Harness()
    harness.submit("both", pull("a", 1), pull("a", 1, server=1, chunk=1))
    assert harness.submit("behind", push("a", 2, server=1, chunk=1)) == []
    harness.session.fail_server(0, LOST)
    assert harness.tick(0.1) == [("server-1", "push a#1@2")]


def test_broken_job_ends_everything() -> None:
    harness = Harness()
    error = PeerLostError("the scheduler is lost", role="scheduler", rank=0, age=15.0)
    harness.submit("push", push("a", 1))
    harness.submit("pull", pull("a", 1), more=5)
    harness.session.fail_all(error)
    harness.session.validate()
    assert harness.submit("late", push("a", 2, 100)) == []
    assert [harness.error(name) for name in ("push", "pull", "late")] == [error] * 3
    assert harness.released == [8, 100]
    assert harness.tick(100.0) == []


def test_batch_of_an_operation_that_has_ended_is_given_up() -> None:
    harness = Harness()
    harness.submit("push", push("a", 1), more=1)
    harness.session.fail_all(LOST)
    assert harness.session.submit(harness.operations["push"], [push("a", 1, 100, chunk=1)], 0.0) == []
    assert harness.released == [8, 100]
