"""How keys come to be: rank 0 gives values to the servers, the other ranks wait for that and compare what they see."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from kvstore import dist_requests as requests
from kvstore.arrays import host_view
from kvstore.dist_key import DistKey, listed
from kvstore.dist_link import Link
from kvstore.messages import Key

WAVE = 16
"""Messages of values that are on the way at once."""


def assign(
    link: Link, keys: Sequence[DistKey], values: Sequence[Any], sync: bool, average: bool, message_bytes: int
) -> None:
    """Rank 0: set the keys' values, and return once the servers have them. `values`: one array per key."""
    flats = [host_view(value, key.key).reshape(-1) for key, value in zip(keys, values, strict=True)]
    messages = requests.assignments(list(zip(keys, flats, strict=True)), sync, average, message_bytes)
    while wave := list(itertools.islice(messages, WAVE)):
        link.run(f"value of {listed(keys)}", wave)


def declare(link: Link, keys: Sequence[DistKey], sync: bool, average: bool) -> None:
    """Other ranks: wait until rank 0 has set the keys; first at home, which tells how a key is placed."""
    known = {key.key: key for key in keys}

    def learn(key: Key, whole: bool) -> None:
        known[key].whole = whole

    _declare(link, [(key, key.server(0)) for key in keys], sync, average, learn)
    others = [(key, server) for key in keys for server in key.servers - {key.server(0)}]
    _declare(link, others, sync, average, learn)


def _declare(
    link: Link, targets: list[tuple[DistKey, int]], sync: bool, average: bool, learn: Callable[[Key, bool], None]
) -> None:
    parts = requests.declarations(targets, sync, average, learn)
    link.run(f"rank 0's value of {listed([key for key, _ in targets])}", parts)
