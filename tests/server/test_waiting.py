"""Requests that wait: retried in order, replaced when sent again, ended by their deadline; and what is sent."""

from __future__ import annotations

from kvstore.errors import KVStoreError, OperationTimeoutError
from kvstore.machine import Send
from kvstore.messages import Ack, ChunkEntry, Failed, Failure, Values
from kvstore.server.waiting import Outbox, Waiter, Waiting

ENTRY = ChunkEntry("w", 0, 1, 1)


class Harness:
    def __init__(self) -> None:
        self.waiting = Waiting()
        self.ready: set[str] = set()
        self.answered: list[str] = []

    def add(self, subject: str, name: str, sender: str = "a", sequence: int = 1, deadline: float = 10.0) -> None:
        def retry() -> bool:
            if name in self.ready:
                self.answered.append(name)
            return name in self.ready

        def explain() -> KVStoreError:
            return OperationTimeoutError(name)

        self.waiting.add(subject, Waiter(sender, sequence, deadline, retry, explain))


def test_waiters_of_a_subject_are_retried_in_order_until_they_are_answered() -> None:
    harness = Harness()
    for sequence, name in enumerate(["one", "two", "three"]):
        harness.add("x", name, sequence=sequence)
    harness.add("y", "other", sequence=3)
    harness.ready |= {"three", "one", "other"}
    harness.waiting.retry("x")
    assert harness.answered == ["one", "three"]
    assert len(harness.waiting) == 2
    harness.ready.add("two")
    harness.waiting.retry("x")
    harness.waiting.retry("x")
    assert harness.answered == ["one", "three", "two"]
    harness.waiting.retry_all()
    assert harness.answered == ["one", "three", "two", "other"]
    assert len(harness.waiting) == 0


def test_request_that_comes_again_takes_the_place_of_the_first() -> None:
    harness = Harness()
    harness.add("x", "first", deadline=5.0)
    harness.add("x", "again", deadline=9.0)
    harness.add("x", "of another sender", sender="b")
    assert len(harness.waiting) == 2
    assert list(harness.waiting.expire(5.0)) == []
    harness.ready |= {"first", "again"}
    harness.waiting.retry("x")
    assert harness.answered == ["again"]


def test_deadline_ends_a_wait_with_its_reason() -> None:
    harness = Harness()
    harness.add("x", "soon", sequence=1, deadline=5.0)
    harness.add("x", "later", sequence=2, deadline=6.0)
    assert [str(error) for _, error in harness.waiting.expire(5.0)] == ["soon"]
    assert [str(error) for _, error in harness.waiting.expire(5.5)] == []
    assert [str(error) for _, error in harness.waiting.expire(7.0)] == ["later"]
    assert len(harness.waiting) == 0


def test_waiter_may_come_while_others_are_retried() -> None:
    harness = Harness()

    def retry() -> bool:
        harness.add("x", "new", sequence=2)
        return True

    harness.waiting.add("x", Waiter("a", 1, 10.0, retry, KVStoreError("x").with_traceback))  # type: ignore[arg-type]
    harness.waiting.retry("x")
    assert len(harness.waiting) == 1
    harness.ready.add("new")
    harness.waiting.retry("x")
    assert harness.answered == ["new"]


def test_values_to_one_receiver_share_messages_up_to_the_limit() -> None:
    outbox = Outbox(100)
    entries = [ChunkEntry("w", chunk, 1, 1) for chunk in range(4)]
    for entry, size in zip(entries, (60, 40, 1, 500), strict=True):
        outbox.value("a", entry, bytes(size))
    outbox.value("b", entries[0], bytes(60))
    outbox.add(Send("a", Ack(sequences=[1])))
    sent = outbox.take()
    values = [
        (action.to, action.message.entries)
        for action in sent
        if isinstance(action, Send) and isinstance(action.message, Values)
    ]
    assert values == [("a", entries[:2]), ("a", entries[2:3]), ("a", entries[3:]), ("b", entries[:1])]
    assert outbox.take() == []


def test_error_travels_with_its_facts() -> None:
    outbox = Outbox(100)
    outbox.failed("a", 7, OperationTimeoutError("late", key="w", rank=2), [ENTRY])
    outbox.failed("b", 8, KVStoreError("whole"))
    failure = Failure("OperationTimeoutError", "late", {"key": "w", "rank": 2})
    assert outbox.take() == [
        Send("a", Failed(failure=failure, sequence=7, entries=[ENTRY])),
        Send("b", Failed(failure=Failure("KVStoreError", "whole"), sequence=8)),
    ]
