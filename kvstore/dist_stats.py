"""Counters of a distributed store, in the form that `KVStore.stats` promises."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvstore.dist_key import DistKey

COUNTED = ("pushes", "pulls", "raw_bytes", "sent_bytes", "pulled_bytes", "encode_seconds", "wait_seconds")


def collect(keys: Iterable[DistKey], num_servers: int) -> dict[str, Any]:
    """Return per key, per server and in total what was counted. Servers' shares follow from the placement of chunks."""
    by_key: dict[Any, dict[str, float]] = {}
    servers = {server: {"raw_bytes": 0.0, "sent_bytes": 0.0} for server in range(num_servers)}
    total = dict.fromkeys((*COUNTED, "decode_seconds"), 0.0)
    for key in keys:
        row = {name: getattr(key.counters, name) for name in COUNTED} | {"decode_seconds": 0.0}
        by_key[key.key] = row
        for name, value in row.items():
            total[name] += value
        for chunk in key.chunks:
            part = key.part(chunk)
            share = (part.stop - part.start) / key.elements if key.elements else 0.0
            for name in ("raw_bytes", "sent_bytes"):
                servers[key.server(chunk)][name] += row[name] * share
    return {"keys": by_key, "servers": servers, "total": total}
