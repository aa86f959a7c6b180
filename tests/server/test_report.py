"""Tables of the command: what they show, and that text from other processes cannot drive a terminal."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvstore.compression.registry import describe, known_names
from kvstore.errors import OperationTimeoutError
from kvstore.messages import KeyStatus, ProcessStatus, Role, Status
from kvstore.server.report import (
    compression_summary,
    print_codecs,
    print_findings,
    print_status,
    ratio,
    size,
    status_json,
)
from kvstore.server.status import Finding, JobStatus

ENDPOINT = "tcp://[::1]:4711|ipc:///run/x#0123456789abcdef"
SCHEDULER = Status(
    sequence=1, role=Role.SCHEDULER, rank=0, job="job-1", num_workers=2, num_servers=2,
    processes=[
        ProcessStatus(Role.WORKER, 1, "active", 1.25, "", "host-b", 22),
        ProcessStatus(Role.SERVER, 0, "active", 0.5, ENDPOINT, "host-\x1b[2Ja", 11),
    ],
)  # fmt: skip
SERVER = Status(
    sequence=1, role=Role.SERVER, rank=0, job="job-1", num_workers=2, num_servers=2,
    keys=[KeyStatus("w[red]", 2, 1000, 7, 4_000_000, 250_000), KeyStatus(5, 1, 10, 3, 0, 0)],
    totals={"keys": 2, "elements": 1010, "rounds": 7, "raw_bytes": 4_000_000, "received_bytes": 250_000},
    optimizer="sgd", compression='{"type": "2bit"}',
)  # fmt: skip
JOB = JobStatus(SCHEDULER, {0: SERVER, 1: OperationTimeoutError("no answer within 5 s")})


def test_status_tables(capsys: pytest.CaptureFixture[str]) -> None:
    print_status(JOB, keys=True)
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert ["worker 1", "active", "1.2 s ago", "host-b", "22", ""] in rows
    assert ["server 0", "active", "0.5 s ago", "host-?[2Ja", "11", ENDPOINT] in rows
    assert ["1 worker(s)", "missing", "", "", "", ""] in rows
    assert ["0", "2", "1010", "7", "4.00 MB", "250.00 kB", "16.0 x", "sgd", '{"type": "2bit"}'] in rows
    assert any(row[0] == "1" and "no answer within 5 s" in "".join(row) for row in rows)
    assert ["'w[red]'", "0", "2", "1000", "7", "4.00 MB", "250.00 kB", "16.0 x"] in rows
    assert ["5", "0", "1", "10", "3", "0 B", "0 B", "-"] in rows


def test_keys_are_listed_on_request_only(capsys: pytest.CaptureFixture[str]) -> None:
    print_status(JOB, keys=False)
    assert "w[red]" not in capsys.readouterr().out


def test_balance_of_servers(capsys: pytest.CaptureFixture[str]) -> None:
    def received(count: int) -> Status:
        return Status(
            sequence=1, role=Role.SERVER, rank=0, job="", num_workers=1, num_servers=2, totals={"received_bytes": count}
        )

    print_status(JobStatus(SCHEDULER, {0: received(300), 1: received(100)}), keys=False)
    assert "the busiest server received 1.50 x the mean" in capsys.readouterr().out


def test_status_json() -> None:
    found = json.loads(status_json(JOB))
    process = found["scheduler"]["processes"][1]
    assert (process["role"], process["rank"], process["state"]) == ("server", 0, "active")
    assert found["servers"]["0"]["totals"]["received_bytes"] == 250_000
    assert found["servers"]["1"] == {"error": "no answer within 5 s"}


def test_findings(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings(
        [
            Finding(Role.SCHEDULER, 0, True, "answers"),
            Finding(Role.SERVER, 1, False, "nothing listens at tcp://[::1]:1", "is it\x1b[2J running?"),
        ]
    )
    assert capsys.readouterr().out.splitlines() == [
        "ok   scheduler: answers",
        "FAIL server 1: nothing listens at tcp://[::1]:1",
        "     is it?[2J running?",
    ]


def test_every_codec_and_parameter_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    print_codecs(describe())
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert {row[0] for row in rows} - {""} == set(known_names())
    assert [row[3:] for row in rows if row[3] == "threshold"] == [["threshold", "0.5", "a finite number > 0"]]
    parameters = sum(len(codec.parameters) for codec in describe())
    assert len([row for row in rows if row[3]]) == parameters


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (None, "none"),
        ('{"params": {"type": "2bit", "threshold": "0.5"}, "per_key": []}', "2bit"),
        (
            '{"params": {"type": "2bit", "threshold": "0.25", "min_elements": "9"}, "per_key": [["*.bias", {}]]}',
            "2bit threshold=0.25 min_elements=9 (1 key patterns)",
        ),
        ('{"params": {"type": "of the future"}}', '{"params": {"type": "of the future"}}'),
        ("something else", "something else"),
    ],
)
def test_compression_summary(setting: str | None, text: str) -> None:
    assert compression_summary(setting) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1.5e6, "1.50 MB"), (4e18, "4000.00 PB")],
)
def test_size(count: float, text: str) -> None:
    assert size(count if isinstance(count, int) else float(count)) == text


@pytest.mark.parametrize(("raw", "received", "text"), [(160, 10, "16.0 x"), (0, 10, "0.0 x"), (5, 0, "-")])
def test_ratio(raw: int, received: int, text: str) -> None:
    assert ratio(raw, received) == text


def test_staleness_is_shown_by_powers_of_two(capsys: pytest.CaptureFixture[str]) -> None:
    counts = [(0, 5), (1, 1), (3, 2), (4, 1), (9, 1)]
    print_status(JobStatus(SCHEDULER, {0: msgspec.structs.replace(SERVER, staleness=counts)}), keys=False)
    out = capsys.readouterr().out.split("Staleness of")[1]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert rows == [["0", "5", "50.0%"], ["1", "1", "10.0%"], ["3 to 4", "3", "30.0%"], ["9 to 16", "1", "10.0%"]]
    print_status(JOB, keys=False)
    assert "Staleness" not in capsys.readouterr().out
