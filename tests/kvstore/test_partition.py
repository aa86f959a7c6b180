"""Placement: published hash vectors, independence of the number of servers, balance."""

from __future__ import annotations

from collections import Counter

import pytest

from kvstore.messages import Key
from kvstore.partition import chunk_count, chunk_range, key_hash, server_of

# printf 'sweight' | b2sum -l 64, and so on; the eight bytes read as a little-endian number
VECTORS: list[tuple[Key, int]] = [
    ("weight", 14991316226055756299),
    ("", 16027976456189790694),
    ("größe", 9148303257022039690),
    ("3", 6510796145760724968),
    (0, 3938860082335825607),
    (1, 13097024338345222906),
    (3, 4656314228866595883),
    (-1, 9376631684097872765),
    (9223372036854775807, 8656198280053262570),
    (-9223372036854775808, 1340151813091864102),
]


@pytest.mark.parametrize(("key", "expected"), VECTORS)
def test_hash_vectors(key: Key, expected: int) -> None:
    assert key_hash(key) == expected


def test_int_and_str_keys_differ() -> None:
    assert key_hash(3) != key_hash("3")
    assert key_hash(1) == key_hash(1)
    assert key_hash(True) == key_hash(1), "equal keys have equal hashes, whatever was asked first"


@pytest.mark.parametrize(
    ("elements", "size", "ranges"),
    [
        (0, 64, [(0, 0)]),
        (1, 64, [(0, 1)]),
        (64, 64, [(0, 64)]),
        (65, 64, [(0, 64), (64, 65)]),
        (200, 64, [(0, 64), (64, 128), (128, 192), (192, 200)]),
    ],
)
def test_chunks(elements: int, size: int, ranges: list[tuple[int, int]]) -> None:
    assert [chunk_range(chunk, elements, size) for chunk in range(chunk_count(elements, size))] == ranges


@pytest.mark.parametrize("elements", [2**53 + 1, 2**62, 2**1984])
def test_chunks_of_absurd_sizes_are_counted_exactly(elements: int) -> None:
    """A quotient of floats is wrong from 2**53 on, and overflows at 2**1024."""
    assert chunk_count(elements, 64) == elements // 64 + (elements % 64 > 0)


def test_chunks_go_round_the_servers_from_the_home_of_the_key() -> None:
    home = key_hash("w") % 3
    assert [server_of("w", chunk, 3) for chunk in range(5)] == [(home + chunk) % 3 for chunk in range(5)]
    assert [server_of("w", chunk, 3, whole=True) for chunk in range(5)] == [home] * 5
    assert [server_of("w", chunk, 1) for chunk in range(5)] == [0] * 5


@pytest.mark.parametrize("servers", [1, 2, 3, 5, 8])
def test_large_keys_are_balanced_by_construction(servers: int) -> None:
    held = Counter(server_of("embedding", chunk, servers) for chunk in range(100 * servers))
    assert held == dict.fromkeys(range(servers), 100)


@pytest.mark.parametrize("servers", [2, 3, 5, 8])
def test_small_keys_are_balanced_on_average(servers: int) -> None:
    keys: list[Key] = [f"layer{number}.weight" for number in range(2000)]
    for some in (keys, list(range(2000))):
        held = Counter(server_of(key, 0, servers) for key in some)
        mean = len(some) / servers
        assert len(held) == servers
        assert all(abs(count - mean) < 5 * mean**0.5 for count in held.values()), held
