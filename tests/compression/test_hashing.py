"""The hash of a key is a published value: placement and random numbers must never change."""

from __future__ import annotations

import hashlib

import pytest

from kvstore import partition
from kvstore.compression.hashing import key_hash


@pytest.mark.parametrize(("key", "text"), [("w", b"sw"), (3, b"i\3" + bytes(7)), (-1, b"i" + b"\xff" * 8)])
def test_is_the_first_8_bytes_of_blake2b(key: str | int, text: bytes) -> None:
    assert key_hash(key) == int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def test_placement_uses_the_same_hash() -> None:
    assert partition.server_of("w", 0, 1000) == key_hash("w") % 1000
