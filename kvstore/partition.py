"""Which elements form a chunk, and which server holds it: pure functions of the key, alike on every worker.

Chunk i of key k lies on server (hash(k) + i) mod S, so large keys spread evenly whatever their number, small ones on
average, and nothing needs to be agreed. Chunks do not depend on S: results are equal for any number of servers.
"""

from __future__ import annotations

from kvstore.compression.hashing import key_hash
from kvstore.messages import Key

__all__ = ["chunk_count", "chunk_range", "key_hash", "server_of"]


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
