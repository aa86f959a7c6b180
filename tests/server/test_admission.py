"""Who may join, which rank each gets, who is missing."""

from __future__ import annotations

import pytest

from kvstore.config import Config
from kvstore.errors import JoinError, MismatchError
from kvstore.messages import Register, Role
from kvstore.server.admission import missing_text, ranks, refusal
from kvstore.server.processes import Process

CONFIG = Config(num_workers=3, num_servers=2)
W, S = Role.WORKER, Role.SERVER


def register(role: Role = W, rank: int | None = None, **changes: object) -> Register:
    fields: dict[str, object] = {
        "num_workers": 3, "num_servers": 2, "chunk_elements": 262_144, "pid": 5, "host": "new",
        "endpoint": "tcp://e" if role is S else "",
    }  # fmt: skip
    return Register(role=role, rank=rank, **{**fields, **changes})  # type: ignore[arg-type]


def processes(*members: tuple[Role, int | None]) -> list[Process]:
    return [
        Process(f"n{i}", role, wanted, "tcp://h" if role is S else "", f"host{i}", 100 + i, 0.0)
        for i, (role, wanted) in enumerate(members)
    ]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([], {}),
        ([(W, None), (S, None), (W, None), (W, None)], {"n0": 0, "n2": 1, "n3": 2}),
        ([(W, 2), (W, 0), (W, 1)], {"n0": 2, "n1": 0, "n2": 1}),
        ([(W, None), (W, 0), (W, None)], {"n0": 1, "n1": 0, "n2": 2}),
        ([(W, None), (W, 1)], {"n0": 0, "n1": 1}),
    ],
)
def test_ranks(members: list[tuple[Role, int | None]], expected: dict[str, int]) -> None:
    assert ranks(CONFIG, processes(*members), W) == expected


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([], "0 of 2 servers and 0 of 3 workers registered; missing: servers 0, 1; workers 0, 1, 2"),
        ([(S, None), (W, 0), (W, 1), (W, 2)], "1 of 2 servers registered; missing: server 1"),
        ([(S, 1), (W, None), (W, None), (W, None)], "1 of 2 servers registered; missing: server 0"),
        ([(S, None), (S, None), (W, 1)], "1 of 3 workers registered; missing: workers 0, 2"),
        ([(S, None), (S, None), (W, 0), (W, 1), (W, 2)], ""),
    ],
)
def test_missing_text(members: list[tuple[Role, int | None]], expected: str) -> None:
    assert missing_text(CONFIG, processes(*members)) == expected


def test_missing_text_of_a_large_job_stays_short() -> None:
    text = missing_text(Config(num_workers=4096, num_servers=1), [])
    assert "workers 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 4086 more" in text


FULL = [(W, 0), (W, 1), (W, 2)]
REFUSED = [
    (register(num_workers=2), [], False, MismatchError, ["DMLC_NUM_WORKER=2", "scheduler with DMLC_NUM_WORKER=3"]),
    (register(num_servers=7), [], False, MismatchError, ["DMLC_NUM_SERVER=7", "DMLC_NUM_SERVER=2"]),
    (register(chunk_elements=64), [], False, MismatchError, ["KVSTORE_CHUNK_ELEMENTS=64", "=262144"]),
    (
        register(rank=1),
        [(W, 1)],
        False,
        JoinError,
        ["host new, pid 5", "worker 1 (host host0, pid 100)", "DMLC_WORKER_ID"],
    ),
    (
        register(S, 0),
        [(S, 0)],
        False,
        JoinError,
        ["tcp://e", "server 0 (host host0, pid 100, at tcp://h)", "DMLC_SERVER_ID"],
    ),
    (register(rank=3), [], False, JoinError, ["rank 3", "has 3", "0 to 2"]),
    (register(), FULL, False, JoinError, ["one too many", "all 3 worker places", "host host2, pid 102"]),
    (register(), FULL, True, JoinError, ["too late", "all 3 worker places", "host host0, pid 100"]),
    (register(rank=1), FULL, True, JoinError, ["too late", "worker 1 (host host1, pid 101)"]),
    (register(S, endpoint=""), [], False, JoinError, ["server", "where it listens"]),
    (register(Role.SCHEDULER), [], False, JoinError, ["scheduler"]),
]


@pytest.mark.parametrize(("message", "members", "started", "kind", "parts"), REFUSED)
def test_refusal(
    message: Register, members: list[tuple[Role, int | None]], started: bool, kind: type[Exception], parts: list[str]
) -> None:
    error = refusal(CONFIG, processes(*members), started, message)
    assert type(error) is kind
    for part in parts:
        assert part in str(error)


@pytest.mark.parametrize(
    ("message", "members"),
    [(register(), []), (register(rank=2), [(W, 0), (W, None)]), (register(), [(W, 2), (W, 1)]), (register(S, 1), FULL)],
)
def test_admitted(message: Register, members: list[tuple[Role, int | None]]) -> None:
    assert refusal(CONFIG, processes(*members), False, message) is None
