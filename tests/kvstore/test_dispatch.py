"""Decode, hand over, answer: the part that the loop and the simulator share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from kvstore.dispatch import dispatch
from kvstore.errors import ArrayError, ProtocolError
from kvstore.machine import Action, Send
from kvstore.messages import Ack, Beat, Failed, Failure, Frame, Leave, Message
from kvstore.wire import Wire


class Grumbler:
    """Acknowledges `Leave` 1, refuses every other request with an error raised half way through its actions."""

    finished = False

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or ArrayError("key 'w' has shape (3,), given was (2,)", key="w")
        self.got: list[tuple[str, Message, list[bytes], float]] = []

    def receive(self, sender: str, message: Message, frames: Sequence[Frame], now: float) -> Iterable[Action]:
        self.got.append((sender, message, [bytes(frame) for frame in frames], now))
        yield Send(sender, Ack(sequences=[1]))
        if message != Leave(sequence=1):
            raise self.error

    def unreachable(self, to: str, now: float) -> Iterable[Action]:
        return ()

    def tick(self, now: float) -> Iterable[Action]:
        return ()


def test_a_good_message_reaches_the_machine_with_payload_and_time() -> None:
    machine = Grumbler()
    actions = dispatch(machine, Wire("job"), "worker", Wire("job").encode(Leave(sequence=1), [b"abc"]), 2.5)
    assert machine.got == [("worker", Leave(sequence=1), [b"abc"], 2.5)]
    assert actions == [Send("worker", Ack(sequences=[1]))]


def test_a_refused_request_is_answered_with_its_error_and_sequence_only() -> None:
    actions = dispatch(Grumbler(), Wire(), "worker", Wire().encode(Leave(sequence=7)), 0.0)
    failure = Failure("ArrayError", "key 'w' has shape (3,), given was (2,)", {"key": "w"})
    assert actions == [Send("worker", Failed(failure=failure, sequence=7))]


def test_a_refused_message_without_sequence_is_answered_without_one() -> None:
    (action,) = dispatch(Grumbler(), Wire(), "worker", Wire().encode(Beat()), 0.0)
    assert isinstance(action, Send)
    assert isinstance(action.message, Failed)
    assert action.message.sequence is None


@pytest.mark.parametrize("frames", [[], [b"\xc1"], [b""], Wire("old").encode(Leave(sequence=7))])
def test_an_unreadable_message_is_answered_and_never_reaches_the_machine(frames: list[Frame]) -> None:
    machine = Grumbler()
    (action,) = dispatch(machine, Wire("new"), "worker", frames, 0.0)
    assert isinstance(action, Send)
    assert isinstance(action.message, Failed)
    assert (action.to, action.message.sequence) == ("worker", None)
    assert action.message.failure.error == "ProtocolError"
    assert machine.got == []


def test_a_failed_that_is_refused_is_not_answered() -> None:
    failed = Failed(failure=Failure("ServerError", "no"), sequence=7)
    assert dispatch(Grumbler(), Wire(), "server-0", Wire().encode(failed), 0.0) == []


def test_an_unreadable_message_of_one_we_connected_to_is_not_answered() -> None:
    told: list[tuple[str, Exception]] = []
    frames = Wire("old").encode(Leave(sequence=7))
    actions = dispatch(
        Grumbler(), Wire("new"), "server-0", frames, 0.0, chosen=True, report=lambda *both: told.append(both)
    )
    assert actions == []
    ((what, error),) = told
    assert what == ""
    assert isinstance(error, ProtocolError)


def test_a_long_error_travels_shortened() -> None:
    (action,) = dispatch(Grumbler(ArrayError("x" * 10**6)), Wire(), "worker", Wire().encode(Beat()), 0.0)
    assert isinstance(action, Send)
    assert isinstance(action.message, Failed)
    assert action.message.failure.text == "x" * 4000


def test_a_fault_of_the_machine_passes_through_unless_it_is_reported() -> None:
    machine = Grumbler(ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError):
        dispatch(machine, Wire(), "worker", Wire().encode(Leave(sequence=7)), 0.0)
    told: list[tuple[str, Exception]] = []
    actions = dispatch(
        machine, Wire(), "worker", Wire().encode(Leave(sequence=7)), 0.0, report=lambda *both: told.append(both)
    )
    assert told == [("Leave", machine.error)]
    assert actions == [Send("worker", Failed(failure=Failure("ServerError", "ZeroDivisionError: bug"), sequence=7))]


def test_a_refused_request_is_reported() -> None:
    machine = Grumbler()
    told: list[tuple[str, Exception]] = []
    dispatch(machine, Wire(), "worker", Wire().encode(Beat()), 0.0, report=lambda *both: told.append(both))
    assert told == [("Beat", machine.error)]
