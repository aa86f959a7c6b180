"""A job's settings, from the environment or from keyword arguments; validated once, then frozen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

import msgspec

from kvstore.errors import ConfigError, ParameterError, nearest_first
from kvstore.messages import Role
from kvstore.on_stale import OnStale
from kvstore.wire import Limits

Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
LAUNCH_HINT = "kvstore-server launch -n WORKERS -s SERVERS -- python train.py"


class TransportName(StrEnum):
    """`auto`: ipc between processes of one host, else tcp."""

    AUTO = "auto"
    TCP = "tcp"
    IPC = "ipc"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one process of a job. `ENVIRONMENT` names the variable of each field.

    staleness: bound of an asynchronous store, None for none: in rounds of workers for `on_stale` block, in updates of
        the server for drop and scale. smoothness: the loss's Lipschitz constant L, for the check of the learning rate.
    """

    role: Role = Role.WORKER
    root_uri: str = ""
    root_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    num_workers: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    num_servers: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    interface: str = ""
    node_host: str = ""
    bind_host: str = ""
    port: str = ""
    worker_id: Annotated[int, msgspec.Meta(ge=0)] | None = None
    server_id: Annotated[int, msgspec.Meta(ge=0)] | None = None
    job: str = ""
    transport: TransportName = TransportName.AUTO
    insecure: bool = False
    heartbeat: Positive = 1.0
    dead_after: Positive = 15.0
    timeout: Positive = 60.0
    retry: Positive = 5.0
    chunk_elements: Annotated[int, msgspec.Meta(ge=64, le=1 << 26, multiple_of=64)] = 262_144
    message_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 1 << 20
    credit_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 8 << 20
    queue_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 256 << 20
    checksum: bool = False
    staleness: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    on_stale: OnStale = OnStale.BLOCK
    smoothness: Positive | None = None
    log: str = "warning"

    @property
    def limits(self) -> Limits:
        """Wire limits: a frame holds at most one chunk of 8-byte elements, plus room for a codec's own overhead."""
        return Limits(frame=max(Limits.frame, self.chunk_elements * 8 + 65536))


ENVIRONMENT: Mapping[str, str] = {
    "role": "DMLC_ROLE",
    "root_uri": "DMLC_PS_ROOT_URI",
    "root_port": "DMLC_PS_ROOT_PORT",
    "num_workers": "DMLC_NUM_WORKER",
    "num_servers": "DMLC_NUM_SERVER",
    "interface": "DMLC_INTERFACE",
    "node_host": "DMLC_NODE_HOST",
    "bind_host": "KVSTORE_BIND_HOST",
    "port": "KVSTORE_PORT",
    "worker_id": "DMLC_WORKER_ID",
    "server_id": "DMLC_SERVER_ID",
    "job": "KVSTORE_JOB",
    "transport": "KVSTORE_TRANSPORT",
    "insecure": "KVSTORE_INSECURE",
    "heartbeat": "KVSTORE_HEARTBEAT",
    "dead_after": "KVSTORE_DEAD_AFTER",
    "timeout": "KVSTORE_TIMEOUT",
    "retry": "KVSTORE_RETRY",
    "chunk_elements": "KVSTORE_CHUNK_ELEMENTS",
    "message_bytes": "KVSTORE_MESSAGE_BYTES",
    "credit_bytes": "KVSTORE_CREDIT_BYTES",
    "queue_bytes": "KVSTORE_QUEUE_BYTES",
    "checksum": "KVSTORE_CHECKSUM",
    "staleness": "KVSTORE_STALENESS",
    "on_stale": "KVSTORE_ON_STALE",
    "smoothness": "KVSTORE_SMOOTHNESS",
    "log": "KVSTORE_LOG",
}
REQUIRED = ("root_uri", "root_port", "num_workers", "num_servers")
_TYPES: Mapping[str, Any] = {field.name: field.type for field in msgspec.structs.fields(Config)}


def read_config(
    environment: Mapping[str, str] | None = None, required: tuple[str, ...] = REQUIRED, **settings: object
) -> Config:
    """Build a Config from variables and keyword arguments (which win; None means not given).

    Raises:
        ConfigError: required settings are missing; the text lists each with its variable and the launch command.
        ParameterError: a value is malformed or out of range.
    """
    environment = os.environ if environment is None else environment
    given: dict[str, object] = {
        field: environment[variable] for field, variable in ENVIRONMENT.items() if environment.get(variable, "") != ""
    }
    for name, value in settings.items():
        if name not in _TYPES:
            raise ParameterError(
                f"unknown setting {name!r}; known, nearest first: {', '.join(nearest_first(name, _TYPES)[:5])}",
                parameter=name,
            )
        if value is not None:
            given[name] = value
    missing = [name for name in required if name not in given]
    if missing:
        listed = "\n".join(f"  {ENVIRONMENT[name]}  (or keyword {name}=)" for name in missing)
        raise ConfigError(f"a distributed store needs these settings, which are missing:\n{listed}\n{_start_hint()}")
    return _validated(Config(**{name: _convert(name, value) for name, value in given.items()}))


def _start_hint() -> str:
    return f"To start a whole job on this machine: {LAUNCH_HINT}"


def _convert(name: str, value: object) -> Any:
    try:
        return msgspec.convert(value, _TYPES[name], strict=False)
    except msgspec.ValidationError as error:
        raise ParameterError(
            f"{ENVIRONMENT[name]} (setting {name!r}) is {value!r}: {error}",
            parameter=name, given=str(value), allowed=str(error),
        ) from error  # fmt: skip


def _validated(config: Config) -> Config:
    for name in ("num_workers", "num_servers"):
        if getattr(config, name) == 0 and config.root_uri:
            raise ParameterError(
                f"{ENVIRONMENT[name]} (setting {name!r}) is 0, but must be at least 1",
                parameter=name, given="0", allowed=">= 1",
            )  # fmt: skip
    for name, limit in (("worker_id", config.num_workers), ("server_id", config.num_servers)):
        chosen = getattr(config, name)
        if chosen is not None and limit and chosen >= limit:
            raise ParameterError(
                f"{ENVIRONMENT[name]} is {chosen}, but the job has {limit}: allowed are 0 to {limit - 1}",
                parameter=name, given=str(chosen), allowed=f"0..{limit - 1}",
            )  # fmt: skip
    if config.staleness == 0 and config.on_stale is OnStale.SCALE:
        raise ParameterError(
            "KVSTORE_ON_STALE=scale needs a staleness of 1 or more: with 0 every late push would be multiplied by 0",
            parameter="staleness", given="0", allowed=">= 1",
        )  # fmt: skip
    if config.dead_after < 2 * config.heartbeat:
        raise ParameterError(
            f"KVSTORE_DEAD_AFTER {config.dead_after} must be at least twice KVSTORE_HEARTBEAT {config.heartbeat}",
            parameter="dead_after", given=str(config.dead_after), allowed=f">= {2 * config.heartbeat}",
        )  # fmt: skip
    return config
