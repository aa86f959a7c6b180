"""The hash of a key: it places the key on a server, and it separates the random numbers of keys."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache


@lru_cache(maxsize=65536, typed=True)
def key_hash(key: str | int) -> int:
    """64-bit hash: first 8 bytes, little endian, of blake2b over b's' + utf-8 or b'i' + int64 little endian."""
    text = b"s" + key.encode("utf-8", "surrogatepass") if isinstance(key, str) else b"i" + struct.pack("<q", key)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
