"""One server's machine by its messages: rounds, waits, refusals, what it tells of the lost, and hostile messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.compression.policy import CompressionPolicy, policy_to_json
from kvstore.errors import ConfigError, KVStoreError, MismatchError, ProtocolError, UnknownNameError
from kvstore.machine import Send
from kvstore.messages import (
    Push,
    PushEntry,
    ReadState,
    SetCompression,
    SetLearningRate,
    SetOptimizer,
    State,
    Values,
    WriteState,
)
from kvstore.server.shard import NEAR
from kvstore.server.updates import MAX_ROUNDS_AHEAD


def f(*values: float) -> Any:
    return np.array(values, np.float32)


@pytest.fixture
def w(make_shard: Callable[[], Any]) -> Any:
    """A shard that holds 'w' = [0, 0]."""
    harness = make_shard()
    assert harness.assign("w", f(0, 0)) == ["w0 ack 1"]
    return harness


# --- rounds -----------------------------------------------------------------------------------------------------------


def test_round_is_complete_with_the_last_push(w: Any) -> None:
    assert w.push(1, "w", 1, f(1, 2)) == ["w1 ack 2"]
    assert w.pull(1, "w", 1) == []
    assert w.pull(0, "w", 0) == ["w0 w@0 [0.0, 0.0]"]
    assert w.push(0, "w", 1, f(10, 20)) == ["w0 ack 5", "w1 w@1 [11.0, 22.0]"]


def test_early_rounds_are_queued(w: Any) -> None:
    for number in (3, 1, 2):
        w.push(0, "w", number, f(number, 0))
        w.pull(0, "w", number)
    assert w.push(1, "w", 3, f(0, 3)) == ["w1 ack 8"]
    assert w.push(1, "w", 2, f(0, 2)) == ["w1 ack 9"]
    sent = w.push(1, "w", 1, f(0, 1))
    assert sent[0] == "w1 ack 10"
    assert w.pull(1, "w", 3) == ["w1 w@3 [3.0, 3.0]"]


def test_repeated_push_is_acknowledged_and_not_applied(w: Any) -> None:
    w.push(0, "w", 1, f(1, 1))
    assert w.push(0, "w", 1, f(9, 9)) == ["w0 ack 3"]
    w.push(1, "w", 1, f(1, 1))
    assert w.push(1, "w", 1, f(9, 9)) == ["w1 ack 5"]
    assert w.pull(0, "w", 1) == ["w0 w@1 [2.0, 2.0]"]
    assert w.shard.keys()[0].rounds == 1


def test_average(w: Any) -> None:
    w.assign("mean", f(0, 0), average=True)
    w.push(0, "mean", 1, f(1, 2))
    w.push(1, "mean", 1, f(2, 2))
    assert w.pull(0, "mean", 1) == ["w0 mean@1 [1.5, 2.0]"]


def test_refused_push_is_told_to_those_who_wait_until_it_comes_after_all(w: Any) -> None:
    w.push(0, "w", 1, f(1, 1))
    assert w.pull(0, "w", 1) == []
    assert w.refuse(1, "w", 1) == ["w0 failed 3: NonFiniteError rank 1 has NaN", "w1 ack 4"]
    assert w.pull(0, "w", 1) == ["w0 failed 5: NonFiniteError rank 1 has NaN"]
    w.push(1, "w", 1, f(2, 2))
    assert w.pull(0, "w", 1) == ["w0 w@1 [3.0, 3.0]"]
    assert w.refuse(1, "w", 1) == ["w1 ack 8"]
    assert w.pull(0, "w", 1) == ["w0 w@1 [3.0, 3.0]"], "a refusal of an applied round is void"


@pytest.mark.parametrize(
    ("key", "number", "value", "error"),
    [
        ("nothing", 1, f(1, 1), "KeyNotInitializedError chunk 0 of key 'nothing' is not on this server"),
        ("w", 1, f(1), "PayloadError key 'w', chunk 0, rank 0: the payload has 4 bytes, 2 elements take 8"),
    ],
)
def test_failure_of_a_pushed_chunk_comes_before_the_acknowledgement(
    w: Any, key: str, number: int, value: Any, error: str
) -> None:
    failed, acknowledged = w.push(0, key, number, value)
    assert failed.startswith(f"w0 failed 2: {error}")
    assert acknowledged == "w0 ack 2"
    assert w.shard.keys()[0].received_bytes == 0


def test_good_chunks_of_a_message_stand_beside_bad_ones(w: Any) -> None:
    entries = [PushEntry("nothing", 0, 1, "none"), PushEntry("w", 0, 1, "none")]
    w.send(0, Push(sequence=50, rank=0, entries=entries), f(1, 1), f(1, 1))
    w.push(1, "w", 1, f(1, 1))
    assert w.pull(0, "w", 1) == ["w0 w@1 [2.0, 2.0]"]


def test_unknown_codec_is_refused(w: Any) -> None:
    (failed, _) = w.push(0, "w", 1, f(1, 1), codec="zip")
    assert "UnknownNameError" in failed
    assert "2bit" in failed


def test_compressed_integers_are_refused(make_shard: Callable[[], Any]) -> None:

    harness = make_shard()
    harness.assign("count", np.zeros(4, np.int32))
    (failed, _) = harness.push(0, "count", 1, b"\xff\0\0\0", codec="2bit", threshold=0.5)
    assert "ProtocolError rank 0 pushes key 'count', which holds int32, as 2bit: integers travel raw" in failed


# --- waits ------------------------------------------------------------------------------------------------------------


def test_waiting_pull_ends_at_its_deadline_and_names_the_missing_ranks(w: Any) -> None:
    w.pull(0, "w", 1, timeout=5.0)
    assert w.tick(104.9) == []
    assert w.tick(105.0) == [
        "w0 failed 2: OperationTimeoutError pull of key 'w' waited 5.0 s on the server: "
        "round 1 lacks the push of rank 0, 1"
    ]
    w.push(0, "w", 1, f(1, 1))
    w.pull(0, "w", 1, timeout=5.0)
    assert w.tick(110.0) == [
        "w0 failed 4: OperationTimeoutError pull of key 'w' waited 5.0 s on the server: "
        "round 1 lacks the push of rank 1"
    ]
    assert w.tick(200.0) == []


def test_pull_before_init_waits_for_the_value(make_shard: Callable[[], Any]) -> None:

    harness = make_shard()
    assert harness.pull(1, "w", 0) == []
    assert harness.assign("w", f(7, 7)) == ["w0 ack 2", "w1 w@0 [7.0, 7.0]"]


def test_declaration_waits_for_every_chunk_of_a_key(make_shard: Callable[[], Any]) -> None:
    """It was answered at the first of several messages, and the pushes that followed found no chunk."""
    harness = make_shard()
    value = np.zeros(100, np.float32)
    assert harness.declare(1, "w", (100,)) == []
    assert harness.assign("w", value, chunk=0) == ["w0 ack 2"]
    assert harness.assign("w", value, chunk=1) == ["w0 ack 3", "w1 declared 1 [False]"]


def test_declaration_that_differs_is_refused(w: Any) -> None:
    assert w.declare(1, "w") == ["w1 declared 2 [False]"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"shape": (3,)}, "ArrayError key 'w': rank 1 gave shape (3,) and dtype float32, rank 0 gave (2,) and float32"),
        (
            {"dtype": "int32"},
            "ArrayError key 'w': rank 1 gave shape (2,) and dtype int32, rank 0 gave (2,) and float32",
        ),
        ({"sync": False}, "MismatchError key 'w': rank 1 created its store with sync=False, rank 0 with sync=True"),
        (
            {"average": True},
            "MismatchError key 'w': rank 1 created its store with average=True, rank 0 with average=False",
        ),
    ]
    for facts, text in cases:
        (line,) = w.declare(1, "w", **facts)
        assert line.partition(": ")[2] == text


def test_second_init_changes_nothing(w: Any) -> None:
    assert w.assign("w", f(9, 9)) == ["w0 ack 2"], "as a repeat of the first one"
    w.assign("w", f(5, 5), epoch=2)
    assert w.pull(0, "w", 0, epoch=2) == ["w0 w@0 [5.0, 5.0]"]
    with pytest.raises(KVStoreError, match="already initialised"):
        w.assign("w", f(9, 9))


def test_broadcast_waits_for_the_rounds_before_it(w: Any) -> None:
    w.push(0, "w", 1, f(1, 1))
    assert w.assign("w", f(5, 5), epoch=2, round=1) == []
    w.pull(0, "w", 1, epoch=2)
    assert w.push(1, "w", 1, f(1, 1)) == ["w1 ack 5", "w0 ack 3", "w0 w@1 [5.0, 5.0]"]
    w.push(0, "w", 2, f(1, 1))
    w.push(1, "w", 2, f(1, 1))
    assert w.pull(1, "w", 2, epoch=2) == ["w1 w@2 [2.0, 2.0]"]


def test_broadcast_that_waits_in_vain_says_so(w: Any) -> None:
    w.assign("w", f(5, 5), epoch=2, round=1)
    (line,) = w.tick(111.0)
    assert line == "w0 failed 2: OperationTimeoutError broadcast of key 'w': earlier rounds did not complete"


@pytest.mark.parametrize(
    ("lost", "error"),
    [
        (
            True,
            "PeerLostError worker 1 was lost (last heard of 15.0 s before) after round 0 of key 'w'; "
            "round 1 cannot complete",
        ),
        (
            False,
            "PeerLeftError worker 1 left after round 0 of key 'w', so round 1 cannot complete: "
            "give every worker the same number of rounds",
        ),
    ],
)
def test_waits_for_a_worker_that_is_out_end(w: Any, lost: bool, error: str) -> None:
    w.push(0, "w", 1, f(1, 1))
    w.pull(0, "w", 1)
    assert w.gone(1, lost) == [f"w0 failed 3: {error}"]
    assert w.gone(1, lost) == []
    assert w.pull(0, "w", 1) == [f"w0 failed 4: {error}"]
    assert w.pull(0, "w", 0) == ["w0 w@0 [0.0, 0.0]"]


def test_what_a_lost_worker_has_pushed_still_counts(w: Any) -> None:
    w.push(1, "w", 1, f(1, 1))
    w.gone(1)
    w.push(0, "w", 1, f(1, 1))
    assert w.pull(0, "w", 1) == ["w0 w@1 [2.0, 2.0]"]


def test_waits_for_rank_0_end_when_it_is_lost(make_shard: Callable[[], Any]) -> None:

    harness = make_shard()
    harness.pull(1, "w", 0)
    harness.declare(1, "w")
    assert harness.set_optimizer(1, "sgd") == []
    errors = [line.partition(": ")[2] for line in harness.gone(0)]
    assert errors == [
        "PeerLostError worker 0 was lost before it gave key 'w' its value",
        "PeerLostError worker 0 was lost before it gave key 'w' its value",
        "PeerLostError worker 0 was lost before it called set_optimizer",
    ]


# --- optimizer and state ----------------------------------------------------------------------------------------------


def test_optimizer_updates_on_the_server(w: Any) -> None:
    assert w.set_optimizer(1, "sgd", learning_rate=0.5) == []
    assert w.set_optimizer(0, "sgd", learning_rate=0.5) == ["w0 ack 3", "w1 ack 2"]
    w.push(0, "w", 1, f(1, 2))
    w.push(1, "w", 1, f(1, 2))
    assert w.pull(0, "w", 1) == ["w0 w@1 [-1.0, -2.0]"]
    rate = SetLearningRate(sequence=50, rank=0, learning_rate=0.25)
    assert w.send(0, rate) == ["w0 ack 50"]
    w.push(0, "w", 2, f(1, 2))
    w.push(1, "w", 2, f(1, 2))
    assert w.pull(0, "w", 2) == ["w0 w@2 [-1.5, -3.0]"]
    assert '"learning_rate":0.25' in str(w.shard.optimizer)


def test_compression_setting_is_kept_for_people(w: Any) -> None:
    text = policy_to_json(CompressionPolicy.parse({"type": "2bit", "threshold": 2}))
    assert w.send(0, SetCompression(sequence=9, rank=0, params=text)) == ["w0 ack 9"]
    assert w.shard.compression == text


@pytest.mark.parametrize(
    "params", ["", "7", "[]", '{"type": "2bit"}', '{"params": {"type": "nonsense"}, "per_key": []}', "[" * 10_000]
)
def test_compression_that_this_server_does_not_know_is_refused(w: Any, params: str) -> None:
    with pytest.raises(ConfigError):
        w.send(0, SetCompression(sequence=9, rank=0, params=params))
    assert w.shard.compression is None


def test_pushes_far_ahead_are_acknowledged_when_their_rounds_are_near(w: Any) -> None:
    """A refused push left its round open for ever; an unbounded one filled the server's memory."""
    assert [w.push(0, "w", number, f(1, 1)) for number in range(1, NEAR + 1)] == [
        [f"w0 ack {sequence}"] for sequence in range(2, NEAR + 2)
    ]
    assert w.push(0, "w", NEAR + 1, f(1, 1)) == []
    assert w.push(0, "w", MAX_ROUNDS_AHEAD + 1, f(1, 1)) == [], "not kept either"
    assert w.push(1, "w", 1, f(1, 1))[0] == f"w0 ack {NEAR + 2}"
    for number in range(2, NEAR + 2):
        w.push(1, "w", number, f(number, 1))
    assert w.pull(0, "w", NEAR + 1) == [f"w0 w@{NEAR + 1} [{NEAR + 2:.1f}, 2.0]"]


def test_another_attempt_at_init_replaces_the_first(make_shard: Callable[[], Any]) -> None:
    harness = make_shard()
    harness.assign("w", f(1, 1))
    harness.assign("w", f(2, 2))
    assert harness.pull(0, "w", 0) == ["w0 w@0 [2.0, 2.0]"]


def test_spread_keys_are_refused_where_the_optimizer_needs_them_whole(
    make_shard: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_shard()
    monkeypatch.setattr(type(harness.shard._updates), "needs_whole", True)
    with pytest.raises(ConfigError, match="before init"):
        harness.assign("w", np.zeros(100, np.float32))
    harness.assign("w", np.zeros(100, np.float32), whole=True)
    harness.assign("small", f(1, 1))


def test_state_is_read_and_written(w: Any) -> None:
    assert w.send(1, ReadState(sequence=8, rank=1, key="w", chunk=0)) == ["w1 State"]
    write = WriteState(sequence=9, rank=0, key="w", chunk=0, step=3, names=["value"], dtypes=["float32"])
    assert w.send(0, write, f(4, 5)) == ["w0 ack 9"]
    assert w.pull(0, "w", 0) == ["w0 w@0 [4.0, 5.0]"]
    (action,) = w.shard.receive("w1", ReadState(sequence=10, rank=1, key="w", chunk=0), (), 0.0)
    assert isinstance(action, Send)
    assert isinstance(action.message, State)
    assert (action.message.step, action.message.names) == (3, ["value"])


def test_optimizer_that_nobody_registered(w: Any) -> None:
    message = SetOptimizer(sequence=4, rank=0, turn=1, spec='{"name":"mine","params":{}}', timeout=1.0)
    (line,) = w.send(0, message)
    assert line.startswith(f"w0 failed 4: {UnknownNameError.__name__} no optimizer is called 'mine'")
    assert w.set_optimizer(0, "sgd", turn=2) == ["w0 ack 2"]
    (line,) = w.set_optimizer(1, "adam", turn=2)
    assert MismatchError.__name__ in line


def test_message_of_another_kind_is_refused(w: Any) -> None:
    with pytest.raises(ProtocolError, match="Values is nothing a server answers"):
        w.send(0, Values(entries=[]))


def test_pushes_that_came_early_survive_a_broadcast(w: Any) -> None:
    w.push(0, "w", 1, f(1, 1))
    w.push(1, "w", 1, f(1, 1))
    w.push(1, "w", 2, f(4, 4))
    w.assign("w", f(9, 9), epoch=2, round=1)
    w.push(0, "w", 2, f(1, 1))
    assert w.pull(0, "w", 2, epoch=2) == ["w0 w@2 [5.0, 5.0]"]
    w.set_optimizer(0, "test")
    w.assign("asynchronous", f(0, 0), sync=False)
    w.push(1, "asynchronous", 2, f(2, 2))
    w.assign("asynchronous", f(10, 10), sync=False, epoch=2)
    w.push(1, "asynchronous", 1, f(1, 1))
    assert w.pull(1, "asynchronous", 2, epoch=2) == ["w1 asynchronous@2 [13.0, 13.0]"]


def test_a_stale_assignment_does_not_destroy_a_key(w: Any) -> None:
    w.assign("w", np.zeros(100, np.float32), epoch=2)
    w.assign("w", np.zeros(100, np.float32), epoch=2, chunk=1)
    w.assign("w", np.zeros(200, np.float32), epoch=1, chunk=2)
    assert w.pull(0, "w", 0, epoch=2)[0].startswith("w0 w@0 [0.0, 0.0")
    with pytest.raises(ProtocolError, match="epoch 0"):
        w.assign("w", f(1, 1), epoch=0)
