"""Tables of `kvstore-server`: who is in a job, what its servers hold, what a check found, which codecs there are."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvstore.compression.registry import CodecRow, params_to_strings, parse_params
from kvstore.errors import ConfigError, to_wire
from kvstore.messages import Number, Status
from kvstore.server.output import name
from kvstore.server.status import Finding, JobStatus

_WIDTH = 200
"""Columns when nobody's terminal limits them."""

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def print_status(job: JobStatus, *, keys: bool) -> None:
    """Tables of the job's processes, of its servers and, if asked for, of every key."""
    console = _console()
    console.print(_processes(job.scheduler))
    console.print(_servers(job))
    if any(isinstance(answer, Status) and answer.staleness for answer in job.servers.values()):
        console.print(_staleness(job))
    if keys:
        console.print(_keys(job))


def status_json(job: JobStatus) -> str:
    """The same as one JSON object: `scheduler`, and `servers` by rank; an unreachable server is its `error`."""
    servers = {
        str(rank): answer if isinstance(answer, Status) else {"error": to_wire(answer)[1]}
        for rank, answer in job.servers.items()
    }
    return msgspec.json.encode(_named({"scheduler": job.scheduler, "servers": servers})).decode()


def _named(value: Any) -> Any:
    """Objects with named fields, which some messages leave out on the wire."""
    if isinstance(value, msgspec.Struct):
        value = {field: getattr(value, field) for field in value.__struct_fields__}
    if isinstance(value, dict):
        return {field: _named(one) for field, one in value.items()}
    return [_named(one) for one in value] if isinstance(value, list) else value


def print_findings(findings: Sequence[Finding]) -> None:
    """One line a process, and what to do about those that are not well."""
    console = _console()
    for finding in findings:
        mark = "[green]ok  [/]" if finding.ok else "[red]FAIL[/]"
        console.print(mark, end=" ", markup=True)
        console.print(f"{name(finding.role, finding.rank)}: {_plain(finding.text)}")
        if finding.hint:
            console.print(f"     {_plain(finding.hint)}")


def print_codecs(rows: Iterable[CodecRow]) -> None:
    """Every registered codec with its parameters, their defaults and what they may be."""
    console = _console()
    table = Table("type", "bits/element", "properties", "parameter", "default", "allowed", title="Codecs")
    for row in rows:
        named = {
            "unbiased": row.unbiased, "contraction": row.contraction, "linear": row.linear,
            "accumulates": row.accumulates, "error feedback": row.feedback, "whole key": row.unit == "key",
        }  # fmt: skip
        properties = ", ".join(text for text, holds in named.items() if holds)
        first = (row.name, f"{row.bits_per_element:.2f}", properties)
        for position, parameter in enumerate(row.parameters):
            texts = map(_plain, (parameter.name, parameter.default, parameter.allowed))
            table.add_row(*(first if position == 0 else ("", "", "")), *texts)
        table.add_section()
    console.print(table)


def _processes(status: Status) -> Table:
    title = f"Job {_plain(status.job)}: {status.num_workers} workers, {status.num_servers} servers"
    table = Table("process", "state", "heard of", "host", "pid", "endpoint", title=title)
    for process in sorted(status.processes, key=lambda process: (process.role, process.rank)):
        heard, pid = f"{process.age:.1f} s ago", str(process.pid)
        table.add_row(
            name(process.role, process.rank), *map(_plain, (process.state, heard, process.host, pid, process.endpoint))
        )
    for role, count in (("server", status.num_servers), ("worker", status.num_workers)):
        if missing := count - sum(process.role == role for process in status.processes):
            table.add_row(f"{missing} {role}(s)", "missing", "", "", "", "")
    return table


def _servers(job: JobStatus) -> Table:
    columns = ("server", "keys", "elements", "rounds", "raw", "received", "ratio", "optimizer", "compression")
    table = Table(*columns, title="Servers", caption=_balance(job))
    for rank, answer in sorted(job.servers.items()):
        if not isinstance(answer, Status):
            table.add_row(str(rank), _plain(str(answer)))
            continue
        totals = answer.totals
        raw, received = totals.get("raw_bytes", 0), totals.get("received_bytes", 0)
        counts = (str(totals.get(column, 0)) for column in ("keys", "elements", "rounds"))
        settings = (_plain(answer.optimizer or "none"), _plain(compression_summary(answer.compression)))
        table.add_row(str(rank), *counts, size(raw), size(received), ratio(raw, received), *settings)
    return table


def _staleness(job: JobStatus) -> Table:
    """How many asynchronous pushes were how many updates old, 1 to 2, 3 to 4, 5 to 8, ... together."""
    table = Table("updates old", "pushes", "share", title="Staleness of asynchronous pushes")
    counts: dict[int, int] = {}
    for answer in job.servers.values():
        for old, pushes in answer.staleness if isinstance(answer, Status) else ():
            bound = 1 << (old - 1).bit_length() if old else 0
            counts[bound] = counts.get(bound, 0) + pushes
    total = sum(counts.values())
    for bound, pushes in sorted(counts.items()):
        label = str(bound) if bound < 3 else f"{bound // 2 + 1} to {bound}"
        table.add_row(label, str(pushes), f"{pushes / total:.1%}")
    return table


def _keys(job: JobStatus) -> Table:
    table = Table("key", "server", "chunks", "elements", "rounds", "raw", "received", "ratio", title="Keys")
    rows = [(key, rank) for rank, answer in job.servers.items() if isinstance(answer, Status) for key in answer.keys]
    for key, rank in sorted(rows, key=lambda row: (str(row[0].key), row[1])):
        counts = (str(count) for count in (rank, key.chunks, key.elements, key.rounds))
        sizes = (size(key.raw_bytes), size(key.received_bytes), ratio(key.raw_bytes, key.received_bytes))
        table.add_row(_plain(repr(key.key)), *counts, *sizes)
    return table


def _balance(job: JobStatus) -> str | None:
    received = [answer.totals.get("received_bytes", 0) for answer in job.servers.values() if isinstance(answer, Status)]
    if len(received) < 2 or not sum(received):
        return None
    return f"the busiest server received {max(received) * len(received) / sum(received):.2f} x the mean"


def compression_summary(setting: str | None) -> str:
    """A compression setting as servers keep it (JSON), in short: type, what is not default, number of key patterns."""
    if not setting:
        return "none"
    try:
        found = msgspec.json.decode(setting, type=dict[str, Any])
        params = parse_params(found["params"], top_level=False)
    except (msgspec.DecodeError, KeyError, ConfigError):  # an older or newer release: shown as it came
        return setting
    defaults = params_to_strings(parse_params({"type": params.type}, top_level=False))
    given = params_to_strings(params)
    parts = [params.type, *(f"{field}={value}" for field, value in given.items() if defaults.get(field) != value)]
    patterns = len(found.get("per_key") or ())
    return " ".join([*parts, *([f"({patterns} key patterns)"] if patterns else [])])


def size(count: Number) -> str:
    """Bytes for people, decimal: '1.50 MB'."""
    amount, unit = float(count), 0
    while amount >= 1000 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.2f} {_UNITS[unit]}" if unit else f"{count} B"


def ratio(raw: Number, received: Number) -> str:
    """How many times less was received than raw gradients would have taken: '15.9 x'."""
    return f"{raw / received:.1f} x" if received else "-"


def _plain(text: str) -> str:
    """Text from another process without what could drive a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _console() -> Console:
    # No markup: an address like tcp://[::1]:80 is none.
    options: dict[str, Any] = {} if sys.stdout.isatty() else {"width": _WIDTH}
    return Console(markup=False, highlight=False, **options)
