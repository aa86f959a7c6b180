"""Counters per key, per server and in total."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.arrays import Template
from kvstore.dist_key import DistKey, KeyCounters
from kvstore.dist_stats import collect


def key(name: str, elements: int, **counters: float) -> DistKey:
    counted = KeyCounters(**counters)  # type: ignore[arg-type]
    return DistKey(name, Template((elements,), np.dtype(np.float32)), 64, 2, 0, counters=counted)


def test_totals_are_sums_over_keys() -> None:
    stats = collect([key("a", 64, pushes=2, raw_bytes=512), key("b", 64, pushes=3, pulls=1, wait_seconds=0.5)], 2)
    assert stats["keys"]["a"] == {
        "pushes": 2, "pulls": 0, "raw_bytes": 512, "sent_bytes": 0, "pulled_bytes": 0,
        "encode_seconds": 0.0, "wait_seconds": 0.0, "decode_seconds": 0.0,
    }  # fmt: skip
    assert {name: stats["total"][name] for name in ("pushes", "pulls", "raw_bytes", "wait_seconds")} == {
        "pushes": 5,
        "pulls": 1,
        "raw_bytes": 512,
        "wait_seconds": 0.5,
    }


def test_servers_have_the_shares_of_their_chunks() -> None:
    one = key("a", 96, raw_bytes=384, sent_bytes=24)
    stats = collect([one], 2)
    home = one.server(0)
    assert stats["servers"][home] == pytest.approx({"raw_bytes": 256, "sent_bytes": 16})
    assert stats["servers"][1 - home] == pytest.approx({"raw_bytes": 128, "sent_bytes": 8})


def test_empty_key_and_no_keys() -> None:
    assert collect([key("a", 0, pushes=1)], 1)["total"]["pushes"] == 1
    assert collect([], 2)["servers"] == {server: {"raw_bytes": 0.0, "sent_bytes": 0.0} for server in range(2)}
