"""Which elements form a chunk, and which server holds it: pure functions of the key, alike on every worker.

Chunk i of key k lies on server (hash(k) + i) mod S, so large keys spread evenly whatever their number, small ones on
average, and nothing needs to be agreed. Chunks do not depend on S: results are equal for any number of servers.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

from kvstore.messages import Key


@lru_cache(maxsize=65536, typed=True)
def key_hash(key: Key) -> int:
    """64-bit hash: first 8 bytes, little endian, of blake2b over b's' + utf-8 or b'i' + int64 little endian."""
    text = b"s" + key.encode("utf-8", "surrogatepass") if isinstance(key, str) else b"i" + struct.pack("<q", key)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def chunk_count(elements: int, chunk_elements: int) -> int:
    """Number of chunks of a key; an empty key has one empty chunk, so that it takes part in rounds."""
    return max(1, -(-elements // chunk_elements))


def chunk_range(chunk: int, elements: int, chunk_elements: int) -> tuple[int, int]:
    """First element of the chunk and the one after its last."""
    start = chunk * chunk_elements
    return start, min(start + chunk_elements, elements)


def server_of(key: Key, chunk: int, num_servers: int, whole: bool = False) -> int:
    """Rank of the server that holds the chunk; all chunks of a `whole` key lie with its first one."""
    return (key_hash(key) + (0 if whole else chunk)) % num_servers
