"""What is queued for one server, and on its way: order, fusion, credits, repeats."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.config import Config
from kvstore.lane import Lane, PullPart, PushPart, Sent
from kvstore.machine import Action, Send
from kvstore.messages import ChunkEntry, Pull, Push, PushEntry
from kvstore.operation import Operation

CONFIG = Config(message_bytes=1024, credit_bytes=2048, retry=5.0)


class Harness:
    """A lane, numbers for its messages, and parts to put into it."""

    def __init__(self, config: Config = CONFIG) -> None:
        self.lane = Lane(config, "server-0", 3)
        self.next: Callable[[], int] = itertools.count(1).__next__
        self.operation = Operation("test", 60.0, 10**6)

    def push(self, key: str, size: int, priority: int = 0, operation: Operation | None = None) -> PushPart:
        entry = PushEntry(key, 0, 1, "none")
        part = PushPart(operation or self.operation, entry, bytes(size), priority, 0)
        self.lane.queue_push(part)
        return part

    def pull(self, key: str, size: int, priority: int = 0, operation: Operation | None = None) -> PullPart:
        part = PullPart(operation or self.operation, ChunkEntry(key, 0, 1, 1), np.zeros(size, np.uint8), priority)
        self.lane.queue_pull(part)
        return part

    def pump(self, now: float = 0.0) -> list[list[object]]:
        actions = self.lane.pump(self.next, now)
        self.lane.validate()
        return keys_of(actions)


def messages(actions: Sequence[Action]) -> list[Push | Pull]:
    found = []
    for action in actions:
        assert isinstance(action, Send)
        assert action.to == "server-0"
        assert isinstance(action.message, Push | Pull)
        found.append(action.message)
    return found


def keys_of(actions: Sequence[Action]) -> list[list[object]]:
    return [[entry.key for entry in message.entries] for message in messages(actions)]


def test_small_chunks_share_a_message() -> None:
    harness = Harness()
    for key, size in (("a", 400), ("b", 624), ("c", 1)):
        harness.push(key, size)
    actions = harness.lane.pump(harness.next, 0.0)
    assert keys_of(actions) == [["a", "b"], ["c"]]
    first = actions[0]
    assert isinstance(first, Send)
    assert [len(frame) for frame in first.frames] == [400, 624]
    assert messages(actions)[0] == Push(
        sequence=1, rank=3, entries=[PushEntry("a", 0, 1, "none"), PushEntry("b", 0, 1, "none")]
    )


def test_larger_priority_first_else_first_come() -> None:
    harness = Harness()
    for key, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5)):
        harness.push(key, 1000, priority)
    assert harness.pump() == [["b"], ["d"]]
    harness.lane.acknowledge(1)
    harness.lane.acknowledge(2)
    assert harness.pump() == [["a"], ["c"]]


def test_credit_bounds_pushed_bytes_under_way() -> None:
    harness = Harness()
    for key in "abcd":
        harness.push(key, 1000)
    assert harness.pump() == [["a"], ["b"]]
    assert harness.pump() == []
    assert [part.entry.key for part in harness.lane.acknowledge(1)] == ["a"]
    assert harness.pump() == [["c"]]
    assert harness.lane.acknowledge(1) == [], "an acknowledgement that comes twice gives nothing"
    assert harness.pump() == []


def test_what_exceeds_the_credit_goes_alone() -> None:
    harness = Harness()
    harness.push("large", 5000)
    harness.push("small", 1)
    assert harness.pump() == [["large"]]
    harness.lane.acknowledge(1)
    assert harness.pump() == [["small"]]


def test_pushes_and_pulls_have_credits_of_their_own() -> None:
    harness = Harness()
    harness.pull("a", 2048)
    harness.push("b", 2048)
    assert sorted(harness.pump()) == [["a"], ["b"]]


def test_values_give_credit_back_and_answer_exactly_their_version() -> None:
    harness = Harness()
    part = harness.pull("a", 2048)
    harness.pull("b", 10)
    assert harness.pump() == [["a"]]
    assert harness.lane.take_pulls(ChunkEntry("a", 0, 2, 1)) == []
    assert harness.lane.take_pulls(ChunkEntry("a", 0, 1, 2)) == []
    assert harness.pump() == []
    assert harness.lane.take_pulls(ChunkEntry("a", 0, 1, 1)) == [part]
    assert harness.lane.take_pulls(ChunkEntry("a", 0, 1, 1)) == []
    assert harness.pump() == [["b"]]


def test_equal_pulls_are_answered_by_one_value() -> None:
    harness = Harness()
    parts = [harness.pull("a", 10), harness.pull("a", 10)]
    harness.pump()
    assert harness.lane.take_pulls(ChunkEntry("a", 0, 1, 1)) == parts


def test_pulls_that_wait_for_others_do_not_hold_back_the_rest_for_ever() -> None:
    harness = Harness()
    for key in "abcdefgh":
        harness.pull(key, 2048)
    assert harness.pump() == [["a"]]
    harness.lane.stretch()
    assert harness.pump() == [["b"]]
    harness.lane.stretch()
    assert [*itertools.chain(*harness.pump())] == ["c", "d"]
    harness.lane.take_pulls(ChunkEntry("a", 0, 1, 1))
    assert harness.pump() == [], "an answer came: the limit holds again"
    for key in "bcd":
        harness.lane.take_pulls(ChunkEntry(key, 0, 1, 1))
    assert harness.pump() == [["e"]]


def test_credit_does_not_stretch_while_nothing_waits_for_it() -> None:
    harness = Harness()
    harness.pull("a", 2048)
    harness.pump()
    harness.lane.stretch()
    harness.pull("b", 2048)
    assert harness.pump() == []


def test_unanswered_messages_are_repeated_ever_more_rarely() -> None:
    harness = Harness()
    harness.push("a", 10)
    harness.pull("b", 10)
    harness.pump(now=100.0)
    times = [100 + tenth / 10 for tenth in range(400)]
    repeats = {time: keys_of(actions) for time in times if (actions := harness.lane.resend(time))}
    assert repeats == {105.0: [["a"], ["b"]], 115.0: [["a"], ["b"]], 135.0: [["a"], ["b"]]}


def test_repeats_carry_their_number_and_what_is_left() -> None:
    harness = Harness()
    harness.pull("a", 10)
    harness.pull("b", 10)
    harness.pump(now=0.0)
    harness.lane.take_pulls(ChunkEntry("a", 0, 1, 1))
    (message,) = messages(harness.lane.resend(10.0))
    assert message == Pull(sequence=1, rank=3, entries=[ChunkEntry("b", 0, 1, 1)], timeout=45.0)


def test_servers_wait_nearly_as_long_as_the_last_operation_of_a_message() -> None:
    harness = Harness()
    harness.pull("a", 10, operation=Operation("soon over", 10.0, 1))
    harness.pull("b", 10, operation=Operation("patient", 50.0, 1))
    (message,) = messages(harness.lane.pump(harness.next, 0.0))
    assert isinstance(message, Pull)
    assert message.timeout == 45.0


def test_failures_hit_what_they_name() -> None:
    harness = Harness()
    first, second = Operation("first", 60.0, 1), Operation("second", 60.0, 1)
    harness.push("a", 10, operation=first)
    harness.push("b", 10, operation=second)
    harness.pump()
    assert harness.lane.failed(1, [ChunkEntry("b", 0, 1, 0)]) == {second}
    assert harness.lane.failed(1, [ChunkEntry("b", 0, 2, 0)]) == set()
    assert harness.lane.failed(1, []) == {first, second}
    assert harness.lane.failed(2, []) == set()


def test_pulls_of_ended_operations_are_dropped_and_their_credit_returned() -> None:
    harness = Harness()
    ended = Operation("ended", 60.0, 4)
    pushes = [harness.push(key, 1000, operation=ended) for key in "ab"]
    pulls = [harness.pull(key, 1000, operation=ended) for key in "ab"]
    harness.pump()
    queued = harness.push("c", 1000, operation=ended)
    harness.push("d", 2000)
    harness.pull("d", 2000)
    assert harness.pump() == []
    ended.part_done()
    ended.parts = 0
    ended.part_done()
    assert harness.lane.drop_done_pulls() == pulls
    assert harness.pump() == [["d"]], "the pull; pushes are delivered whatever became of their operation"
    assert harness.lane.drop_pushes()[-2:] == pushes
    assert list(harness.lane.operations()) == [harness.operation]
    assert queued not in harness.lane.drop_pushes()


def test_sent_counts_a_repeat_once() -> None:
    sent = Sent(at=0.0)
    assert [time for time in range(0, 100, 5) if sent.due(time, 10.0)] == [10, 30, 70]
