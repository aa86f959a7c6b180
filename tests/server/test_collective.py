"""Barriers and agreements: one outcome for all, whatever the order of calls, repeats and departures."""

from __future__ import annotations

import pytest

from kvstore.errors import ProtocolError
from kvstore.messages import Ack, Agree, Barrier, Failed, Gone, Role
from kvstore.server.collective import Answer, Collective

LOST = Gone(Role.WORKER, 2, True, 15.5)
LEFT = Gone(Role.WORKER, 2, False)


def barrier(rank: int, turn: int = 0, *, sequence: int | None = None, timeout: float = 60.0) -> Barrier:
    return Barrier(sequence=10 * turn + rank if sequence is None else sequence, rank=rank, turn=turn, timeout=timeout)


def agree(rank: int, value: str, turn: int = 0, topic: str = "compression") -> Agree:
    return Agree(sequence=10 * turn + rank, rank=rank, topic=topic, turn=turn, value=value, timeout=60.0)


def acks(*ranks: int) -> list[Answer]:
    return [(rank, Ack(sequences=[rank])) for rank in ranks]


def failures(answers: list[Answer]) -> list[tuple[int, str]]:
    found = []
    for rank, message in answers:
        assert isinstance(message, Failed)
        found.append((rank, message.failure.error))
    return found


def text_of(answer: Answer) -> str:
    assert isinstance(answer[1], Failed)
    return answer[1].failure.text


def test_barrier_is_answered_when_all_have_called() -> None:
    collective = Collective(3)
    assert collective.call(barrier(2), 0.0) == []
    assert collective.call(barrier(0), 1.0) == []
    assert collective.call(barrier(0), 2.0) == []  # repeated while it is open
    assert collective.call(barrier(1), 3.0) == acks(0, 1, 2)
    assert collective.call(barrier(2), 4.0) == acks(2)  # the Ack was lost
    collective.validate()


def test_turns_do_not_mix() -> None:
    collective = Collective(2)
    collective.call(barrier(0, 0), 0.0)
    assert collective.call(barrier(1, 1), 0.0) == []
    assert collective.call(agree(1, "x"), 0.0) == []
    assert collective.call(barrier(1, 0), 0.0) == acks(0, 1)
    collective.validate()


def test_one_turn_called_twice_is_refused() -> None:
    collective = Collective(2)
    collective.call(barrier(0, sequence=4), 0.0)
    with pytest.raises(ProtocolError, match="worker 0 called barrier 0 twice, as 4, 5"):
        collective.call(barrier(0, sequence=5), 0.0)


def test_timeout_names_who_has_not_called_and_late_callers_get_the_same() -> None:
    collective = Collective(4)
    collective.call(barrier(1, timeout=60.0), 0.0)
    collective.call(barrier(3, timeout=10.0), 1.0)
    collective.call(barrier(2, turn=1, timeout=5.0), 1.0)
    collective.call(barrier(1, turn=1, timeout=50.0), 1.0)
    assert failures(collective.tick(6.0)) == [(1, "OperationTimeoutError"), (2, "OperationTimeoutError")]
    assert collective.tick(10.9) == []
    answers = collective.tick(11.0)
    assert failures(answers) == [(1, "OperationTimeoutError"), (3, "OperationTimeoutError")]
    assert text_of(answers[0]) == "barrier 0 was not complete after 10 s: not called yet by worker 0, 2 (of 4)"
    assert collective.tick(400.0) == []  # nothing is forgotten that somebody has yet to be told
    assert failures(collective.call(barrier(0), 500.0)) == [(0, "OperationTimeoutError")]
    collective.validate()


@pytest.mark.parametrize(("gone", "kind"), [(LOST, "PeerLostError"), (LEFT, "PeerLeftError")])
def test_gone_worker_ends_waits_of_now_and_later(gone: Gone, kind: str) -> None:
    collective = Collective(3)
    collective.call(barrier(0), 0.0)
    collective.call(agree(1, "x"), 0.0)
    answers = collective.depart(gone)
    assert failures(answers) == [(0, kind), (1, kind)]
    failed = answers[0][1]
    assert isinstance(failed, Failed)
    assert failed.failure.facts["rank"] == 2
    assert failed.failure.facts["role"] == "worker"
    assert failed.failure.facts.get("age") == (15.5 if gone.lost else None)
    assert "worker 2" in failed.failure.text
    assert failures(collective.call(barrier(1), 1.0)) == [(1, kind)]
    assert failures(collective.call(barrier(0, 1), 2.0)) == [(0, kind)]
    collective.validate()


def test_lost_worker_with_exit_code_is_told_so() -> None:
    collective = Collective(2)
    collective.call(barrier(0), 0.0)
    (answer,) = collective.depart(Gone(Role.WORKER, 1, True, 0.5, -9))
    assert "worker 1 ended with exit code -9, last heard of 0.5 s before" in text_of(answer)


def test_worker_that_called_before_it_left_counts_but_not_one_that_died() -> None:
    for gone, expected in ((LEFT, ["Ack", "Ack", "Ack"]), (LOST, ["Failed", "Failed"])):
        collective = Collective(3)
        collective.call(barrier(0), 0.0)
        collective.call(barrier(2), 0.0)
        answers = collective.depart(gone)
        if not answers:
            answers = collective.call(barrier(1), 0.0)
        assert [type(message).__name__ for _, message in answers] == expected
        collective.validate()


def test_settled_call_stays_settled() -> None:
    collective = Collective(3)
    for rank in range(3):
        collective.call(barrier(rank), 0.0)
    assert collective.depart(LOST) == []
    assert collective.tick(59.0) == []
    assert collective.call(barrier(1), 59.0) == acks(1)


def test_agreement() -> None:
    collective = Collective(3)
    assert collective.call(agree(0, "a"), 0.0) == []
    assert collective.call(agree(1, "a"), 0.0) == []
    assert collective.call(agree(2, "a"), 0.0) == acks(0, 1, 2)
    for rank, value in ((1, "2bit, threshold 1.0"), (0, "2bit, threshold 0.5"), (2, "2bit, threshold 0.5")):
        answers = collective.call(agree(rank, value, turn=1), 1.0)
    assert failures(answers) == [(rank, "MismatchError") for rank in range(3)]
    assert text_of(answers[0]).splitlines() == [
        "agreement on compression (call 1) failed: every rank must give the same value",
        "  ranks 0, 2: 2bit, threshold 0.5",
        "  rank 1: 2bit, threshold 1.0",
    ]


def test_disagreement_of_many_fits_a_message() -> None:
    collective = Collective(500)
    for rank in range(500):
        answers = collective.call(agree(rank, f"{rank}" * 1000), 0.0)
    assert len(answers) == 500
    assert len(text_of(answers[0])) < 4000
    assert "and 492 other values" in text_of(answers[0])


def test_nothing_is_kept_for_ever() -> None:
    collective = Collective(2)
    for turn in range(100):
        collective.call(barrier(0, turn), float(turn))
        collective.call(barrier(1, turn), float(turn))
        collective.tick(float(turn))
    assert len(collective._gatherings) == 61  # those of the last 60 s, which a worker may still repeat
    collective.tick(1000.0)
    assert not collective._gatherings
