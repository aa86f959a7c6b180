"""Codecs that encode a whole key need all of its chunks on one server: checks of that, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.compression.encoder import Prepared
from kvstore.compression.policy import CompressionPolicy
from kvstore.dist_key import DistKey
from kvstore.dtypes import is_float
from kvstore.errors import ConfigError


def check_placement(policy: CompressionPolicy, keys: Iterable[DistKey]) -> None:
    """Raise ConfigError if a setting would encode whole a key that lies on several servers already."""
    for key in keys:
        if len(key.servers) > 1 and is_float(key.dtype) and policy.whole(key.key, key.dtype):
            raise _spread(key, policy.params_for(key.key, key.elements, key.dtype).type)


def check_whole(pushes: Iterable[tuple[DistKey, Prepared]], limit: int) -> None:
    """Raise ConfigError for a push of a whole key that lies on several servers, or that no message can carry.

    Args:
        pushes: keys and what they are to be encoded as.
        limit: bytes of the largest payload that a message takes.
    """
    for key, prepared in pushes:
        codec = prepared.codec
        if codec is None or prepared.parts == len(key.chunks):
            continue
        if len(key.servers) > 1:
            raise _spread(key, codec.params.type)
        size = prepared.whole_bytes
        if size > limit:
            raise ConfigError(
                f"key {key.key!r}: encoded whole as {codec.params.type!r} it may take {size} bytes, a message takes "
                f"{limit}: set KVSTORE_CHUNK_ELEMENTS to at least {-(-size // 512) * 64} for every process, or give "
                f"the key another codec by per_key", key=key.key,
            )  # fmt: skip


def _spread(key: DistKey, codec: str) -> ConfigError:
    return ConfigError(
        f"compression {codec!r} encodes whole keys, but key {key.key!r} is already spread over {len(key.servers)} "
        f"servers in chunks: call set_gradient_compression before init, or give the key another codec by per_key",
        key=key.key,
    )
