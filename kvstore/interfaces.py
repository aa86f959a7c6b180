"""Network interfaces of this host and their addresses, asked of the Linux kernel; elsewhere only names are known."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from pathlib import Path

from kvstore.errors import AddressError

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")


def interfaces() -> dict[str, list[str]]:
    """Return interface name -> its addresses as text, IPv4 before IPv6, scoped link-local ones last."""
    found = {name: _ipv4(name) for _, name in socket.if_nameindex()}
    for name, address in _ipv6_lines():
        found.setdefault(name, []).append(address)
    return {name: sorted(addresses, key=lambda text: "%" in text) for name, addresses in found.items()}


def interface_address(name: str, family: int = socket.AF_INET) -> str:
    """Return the address of one interface, of the preferred `family` (socket.AF_INET or AF_INET6) if it has one.

    Raises:
        AddressError: no such interface, or it has no address; lists those available with their addresses.
    """
    known = interfaces()
    addresses = known.get(name, [])
    if not addresses:
        trouble = "has no address" if name in known else "does not exist"
        raise AddressError(
            f"interface {name!r} (DMLC_INTERFACE) {trouble}; available: {describe(known)}. "
            f"Or set DMLC_NODE_HOST to this machine's address.",
            interface=name,
        )
    wanted = [address for address in addresses if (":" in address) == (family == socket.AF_INET6)]
    return (wanted or addresses)[0]


def describe(known: dict[str, list[str]]) -> str:
    """One line for messages: 'lo (127.0.0.1, ::1), eth0 (10.0.0.2)'."""
    return ", ".join(f"{name} ({', '.join(addresses) or 'no address'})" for name, addresses in known.items()) or "none"


def _ipv4(name: str) -> list[str]:
    if sys.platform != "linux":
        return []
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:  # the interface has no IPv4 address
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _ipv6_lines() -> list[tuple[str, str]]:
    try:
        lines = _IF_INET6.read_text().splitlines()
    except OSError:  # kernel without IPv6
        return []
    found = []
    for digits, _index, _prefix, _scope, _flags, name in map(str.split, lines):
        address = ipaddress.IPv6Address(int(digits, 16))
        found.append((name, f"{address}%{name}" if address.is_link_local else str(address)))
    return found
