"""Requests of a distributed store: who is asked what, in messages of which size."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.arrays import Template
from kvstore.dist_key import DistKey
from kvstore.dist_requests import (
    agreement,
    assignments,
    barrier,
    declarations,
    refusals,
    to_all_servers,
)
from kvstore.errors import NonFiniteError
from kvstore.messages import (
    Agree,
    AskStatus,
    Assign,
    AssignEntry,
    Barrier,
    Declare,
    Declared,
    DeclareEntry,
    Failure,
    Refuse,
)
from kvstore.operation import Request


def key(name: str, elements: int, servers: int = 1, **facts: Any) -> DistKey:
    given = {"epoch": 1, **facts}
    return DistKey(name, Template((elements,), np.dtype(np.float32)), 64, servers, 0, **given)


def flat(elements: int) -> Any:
    return np.arange(elements, dtype=np.float32)


def built(request: Request, number: int = 5, left: float = 10.0) -> Any:
    return request.build(number, left)


def test_values_are_assigned_in_messages_of_limited_size() -> None:
    found = list(assignments([(key("a", 150, round=3, epoch=2), flat(150)), (key("b", 2), flat(2))], True, True, 512))
    messages = [built(request) for request in found]
    assert [[(entry.key, entry.chunk) for entry in message.entries] for message in messages] == [
        [("a", 0), ("a", 1)],
        [("a", 2), ("b", 0)],
    ]
    assert messages[0] == Assign(
        sequence=5,
        rank=0,
        entries=[AssignEntry("a", chunk, (150,), "float32", 2, 3, True, True, False) for chunk in (0, 1)],
        timeout=9.0,
    )
    assert (
        b"".join(bytes(frame) for request in found for frame in request.frames)
        == flat(150).tobytes() + flat(2).tobytes()
    )


def test_each_server_is_assigned_its_own_chunks() -> None:
    one = key("a", 300, servers=3)
    found = list(assignments([(one, flat(300))], True, False, 1 << 20))
    placed = {entry.chunk: request.to for request in found for entry in built(request).entries}
    assert placed == {chunk: f"server-{one.server(chunk)}" for chunk in range(5)}


def test_declarations_are_grouped_by_server_and_tell_where_a_key_lies() -> None:
    a, b = key("a", 4, servers=2, round=7), key("b", 4, servers=2)
    learnt: list[tuple[Any, bool]] = []
    found = declarations([(a, 0), (b, 1), (b, 0)], False, False, lambda name, whole: learnt.append((name, whole)))
    assert [(request.to, [entry.key for entry in built(request).entries]) for request in found] == [
        ("server-0", ["a", "b"]),
        ("server-1", ["b"]),
    ]
    entries = [DeclareEntry("a", (4,), "float32", 1, False, False, 7), DeclareEntry("b", (4,), "float32", 1, False)]
    assert built(found[0]) == Declare(sequence=5, rank=0, entries=entries, timeout=9.0)
    assert found[0].answered is not None
    found[0].answered(Declared(sequence=5, whole=[True, False]), ())
    assert learnt == [("a", True), ("b", False)]


def test_refusals_name_the_next_round_to_every_server_of_a_key() -> None:
    one = key("a", 300, servers=2, round=4)
    found = refusals([one], NonFiniteError("NaN", key="a", rank=0, count=3))
    assert sorted(request.to for request in found) == ["server-0", "server-1"]
    failure = Failure("NonFiniteError", "NaN", {"key": "a", "rank": 0, "count": 3})
    assert built(found[0]) == Refuse(sequence=5, rank=0, rounds=[("a", 5)], failure=failure)


def test_what_the_scheduler_is_asked() -> None:
    assert barrier(1, 2).to == agreement(1, "x", 2, "y").to == "scheduler"
    assert built(barrier(1, 2)) == Barrier(sequence=5, rank=1, turn=2, timeout=9.0)
    assert built(agreement(1, "x", 2, "y")) == Agree(sequence=5, rank=1, topic="x", turn=2, value="y", timeout=9.0)


def test_all_servers_are_asked_alike() -> None:
    found = to_all_servers(3, lambda number, left: AskStatus(sequence=number))
    assert [request.to for request in found] == ["server-0", "server-1", "server-2"]
    assert built(found[2]) == AskStatus(sequence=5)
