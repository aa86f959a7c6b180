"""Which addresses a process binds, which it advertises, and which of a peer's it connects to.

Endpoints are 'tcp://HOST:PORT' (IPv6 in brackets; where to bind also port '0' or a range '9000-9010') and 'ipc://PATH'.
A server may advertise both: 'tcp://10.0.0.2:4711|ipc:///tmp/kvstore-x/socket#FINGERPRINT', where the fingerprint names
the host, network namespace and user for which the path is good.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from kvstore.config import Config, TransportName
from kvstore.errors import AddressError, ParameterError
from kvstore.interfaces import describe, interface_address, interfaces
from kvstore.messages import Role

IPC_ANYWHERE = "ipc://*"
"""Bind to a socket in a fresh folder of mode 0700."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE = "/proc/self/ns/net"
_ANY_PORT = 9  # where to aim a socket that never sends


def bind_endpoints(config: Config) -> list[str]:
    """Return where a scheduler (root_uri, root_port) or a server (advertised host, `port`; ipc) has to listen.

    Raises:
        AddressError: the host cannot be found, or is not loopback while `insecure` is off.
        ParameterError: `port` is malformed.
    """
    if config.role is Role.SCHEDULER:
        return [join_tcp(host, str(config.root_port)) for host in _scheduler_hosts(config)]
    found = []
    if config.transport is not TransportName.IPC:
        ports = config.port or "0"
        parse_ports(ports)
        host = resolve(config.bind_host or advertised_host(config), config.role)
        found.append(join_tcp(_allowed(host, config), ports))
    if config.transport is not TransportName.TCP:
        found.append(IPC_ANYWHERE)
    return found


def advertise(config: Config, bound: Sequence[str]) -> str:
    """Return what a server tells the others about the endpoints it is bound to; never 0.0.0.0 or port 0."""
    offers = []
    for endpoint in bound:
        if endpoint.startswith("tcp://"):
            offers.append(join_tcp(advertised_host(config), split_tcp(endpoint)[1]))
        else:
            offers.append(f"{endpoint}#{host_fingerprint()}")
    return "|".join(offers)


def advertised_host(config: Config) -> str:
    """Return the host others reach this process by, without brackets.

    The first that applies: DMLC_NODE_HOST; the address of DMLC_INTERFACE; loopback if the scheduler is on loopback
    (see `scheduler_host`); the local address from which this host would talk to the scheduler.

    Raises:
        AddressError: no such interface (lists those available), no route, an unusable or unresolvable host.
    """
    if config.node_host:
        if _is(config.node_host, "is_unspecified"):
            raise AddressError(f"DMLC_NODE_HOST {config.node_host!r} is no address others can reach; {_available()}")
        return _bare(config.node_host)
    scheduler = scheduler_host(config) if config.root_uri else "127.0.0.1"
    if config.interface:
        return interface_address(config.interface, _family(scheduler))
    return scheduler if _is(scheduler, "is_loopback") else _address_towards(scheduler, config)


def scheduler_host(config: Config) -> str:
    """Return the numeric address of the scheduler.

    This machine's own name means loopback, so that a local job needs no network, unless `insecure` opens the job.

    Raises:
        AddressError: DMLC_PS_ROOT_URI does not resolve.
    """
    if not config.insecure and _bare(config.root_uri).lower() == socket.gethostname().lower():
        return "127.0.0.1"
    return resolve(config.root_uri, config.role, "DMLC_PS_ROOT_URI")


def scheduler_endpoint(config: Config) -> str:
    """Return the endpoint workers, servers and tools connect to. Raises AddressError as `scheduler_host`."""
    return join_tcp(scheduler_host(config), str(config.root_port))


def choose_endpoint(advertised: str, config: Config) -> str:
    """Return the one endpoint to connect to: ipc where its path is good, else tcp; the host is numeric.

    Raises:
        AddressError: the host does not resolve, or only ipc is offered or allowed and its path is not good here.
    """
    offers = {offer.partition("://")[0]: offer for offer in advertised.split("|")}
    tcp, ipc = offers.get("tcp"), offers.get("ipc")
    if ipc and (tcp is None or config.transport is not TransportName.TCP):
        path, _, fingerprint = ipc.removeprefix("ipc://").partition("#")
        if fingerprint in ("", host_fingerprint()) and Path(path).exists():
            return f"ipc://{path}"
    if tcp is None or (ipc and config.transport is TransportName.IPC):
        raise AddressError(
            f"{advertised!r} cannot be reached by ipc: it is on another host, in another network namespace or of "
            f"another user. Set KVSTORE_TRANSPORT=auto or tcp in every process.",
            address=advertised, role=config.role.value,
        )  # fmt: skip
    host, port = split_tcp(tcp)
    return join_tcp(resolve(host, config.role), port)


def resolve(host: str, role: Role, variable: str = "") -> str:
    """Return a host's numeric address, without brackets; IPv4 first, as the peers of 'localhost' expect.

    Raises:
        AddressError: the name does not resolve.
    """
    try:
        found = socket.getaddrinfo(_bare(host), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        source = f"{variable} " if variable else ""
        raise AddressError(
            f"{role}: {source}{host!r} is not an address and the name does not resolve ({error})",
            address=host, role=role.value,
        ) from error  # fmt: skip
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


@functools.cache
def host_fingerprint() -> str:
    """Return 16 hex digits naming this boot, network namespace and user; '?' + process id where that is unknown."""
    try:
        facts = f"{_BOOT_ID.read_text()}{os.stat(_NETWORK_NAMESPACE).st_ino}{os.getuid()}"  # noqa: PTH116
    except (OSError, AttributeError):
        return f"?{os.getpid()}"
    return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()


def join_tcp(host: str, port: str) -> str:
    """('::1', '80') -> 'tcp://[::1]:80'."""
    host = _bare(host)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def split_tcp(endpoint: str) -> tuple[str, str]:
    """'tcp://[::1]:80' -> ('::1', '80'). Raises AddressError if it has not that form."""
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not colon or not host or not port:
        raise AddressError(f"{endpoint!r} is not of the form tcp://HOST:PORT", address=endpoint)
    return _bare(host), port


def parse_ports(text: str) -> range:
    """'9000' -> range(9000, 9001), '9000-9010' -> range(9000, 9011).

    Raises:
        ParameterError: anything else, or a port above 65535.
    """
    first, dash, last = text.partition("-")
    last = last if dash else first
    whole = first.isdecimal() and last.isdecimal() and first.isascii() and last.isascii()
    if not whole or int(last) > 65535 or int(first) > int(last) or (dash and int(first) == 0):
        raise ParameterError(
            f"KVSTORE_PORT (setting 'port') is {text!r}: give a port like 9000, a range like 9000-9010, or 0 for any",
            parameter="port", given=text, allowed="0..65535 or FIRST-LAST",
        )  # fmt: skip
    return range(int(first), int(last) + 1)


def _scheduler_hosts(config: Config) -> list[str]:
    host = resolve(config.bind_host, config.role) if config.bind_host else scheduler_host(config)
    hosts = [_allowed(host, config)]
    named_itself = _bare(config.root_uri).lower() == socket.gethostname().lower()
    if named_itself and not _is(host, "is_loopback") and not _is(host, "is_unspecified"):
        hosts.append("127.0.0.1")  # where processes of this host look that were not told `insecure`
    return hosts


def _allowed(host: str, config: Config) -> str:
    if config.insecure or _is(host, "is_loopback"):
        return host
    raise AddressError(
        f"{config.role}: {host} is not a loopback address, and connections are not authenticated: whoever reaches the "
        f"port can read and change the job. Say --insecure (KVSTORE_INSECURE=1) if the network is trusted.",
        address=host, role=config.role.value,
    )  # fmt: skip


def _address_towards(scheduler: str, config: Config) -> str:
    with socket.socket(_family(scheduler), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((scheduler, config.root_port or _ANY_PORT))  # picks the route; UDP sends nothing here
            return str(probe.getsockname()[0])
        except OSError as error:
            raise AddressError(
                f"{config.role}: no route to the scheduler at {scheduler} (DMLC_PS_ROOT_URI {config.root_uri!r}): "
                f"{error.strerror}. Set DMLC_NODE_HOST or DMLC_INTERFACE; {_available()}",
                address=scheduler, role=config.role.value,
            ) from error  # fmt: skip


def _available() -> str:
    return f"interfaces: {describe(interfaces())}"


def _family(numeric: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in numeric else socket.AF_INET


def _bare(host: str) -> str:
    return host.strip().removeprefix("[").removesuffix("]")


def _is(host: str, property_name: str) -> bool:
    try:
        return bool(getattr(ipaddress.ip_address(_bare(host)), property_name))
    except ValueError:  # a name
        return False
