"""`create`: a store by its name."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from kvstore.config import read_config
from kvstore.errors import NotSupportedError, ParameterError, UnknownNameError, nearest_first
from kvstore.messages import Role
from kvstore.store import KVStore

STORES = MappingProxyType(
    {
        "local": "one process; a list of arrays per key is summed on the host",
        "device": "one process; summed on one of the devices, compressed if asked",
        "dist_sync": "servers; a value changes when every worker's push of the round is in",
        "dist_async": "servers; every push is applied at once",
        "dist_device_sync": "dist_sync, lists of device arrays summed on their device first",
        "dist_device_async": "dist_async, lists of device arrays summed on their device first",
    }
)
"""Names of stores, and what each does."""


def create(name: str = "local", *, average: bool = False, **settings: Any) -> KVStore:
    """Make a store. A `dist_*` store joins the job and returns when the job is complete.

    Args:
        name: one of `STORES`; case does not matter.
        average: divide sums by the number of contributing workers. Alike on every rank.
        settings: of a `dist_*` store, as in `kvstore.Config`; they win over the environment.

    Raises:
        UnknownNameError: no such store; lists the names, nearest first.
        ConfigError: settings are missing (lists each, with its variable) or contradict each other.
        JoinError: the job did not come together in time (says who is missing), or refused this process.
    """
    if not isinstance(name, str) or name.lower() not in STORES:
        known = ", ".join(nearest_first(str(name), STORES))
        raise UnknownNameError(f"no store is called {name!r}; there are, nearest first: {known}", name=str(name))
    name = name.lower()
    if not name.startswith("dist_"):
        if settings:
            raise ParameterError(f"a {name!r} store takes no settings, given: {', '.join(sorted(settings))}")
        from kvstore.local import LocalStore

        return LocalStore(name, average=average)
    config = read_config(**settings)
    if config.role is not Role.WORKER:
        raise NotSupportedError(
            f"DMLC_ROLE is {config.role.value!r}: only workers create a store; "
            f"run `kvstore-server {config.role.value}` in this process's place",
            role=config.role.value,
        )
    from kvstore.dist import DistStore

    return DistStore(name, config, average)
