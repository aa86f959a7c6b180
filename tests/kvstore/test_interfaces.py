"""Interfaces are read from the kernel, also on one without IPv6."""

import socket
from pathlib import Path

import pytest

from kvstore import interfaces as module
from kvstore.errors import AddressError
from kvstore.interfaces import describe, interface_address, interfaces

LOOPBACK = next(name for _, name in socket.if_nameindex() if "127.0.0.1" in interfaces()[name])


def test_lists_every_interface_of_the_kernel_with_usable_addresses() -> None:
    found = interfaces()
    assert set(found) >= {name for _, name in socket.if_nameindex()}
    for addresses in found.values():
        for address in addresses:
            socket.getaddrinfo(address, None, flags=socket.AI_NUMERICHOST)


def test_loopback_gives_the_address_of_the_wanted_family_or_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"x": ["10.1.2.3", "fd00::1", "fe80::1%x"], "four": ["10.1.2.4"], "six": ["fd00::2"]}
    monkeypatch.setattr(module, "interfaces", lambda: both)
    assert interface_address("x") == "10.1.2.3"
    assert interface_address("x", socket.AF_INET6) == "fd00::1"
    assert interface_address("four", socket.AF_INET6) == "10.1.2.4"
    assert interface_address("six", socket.AF_INET) == "fd00::2"


def test_ipv6_lines_are_read_link_local_ones_with_scope_and_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth7\nfd000000000000000000000000000002 04 40 00 82     eth7\n"
    )
    monkeypatch.setattr(module, "_IF_INET6", table)
    assert interfaces()["eth7"] == ["fd00::2", "fe80::fc:ff:fe00:1%eth7"]
    monkeypatch.setattr(module, "_IF_INET6", tmp_path / "absent")
    assert all(":" not in address for addresses in interfaces().values() for address in addresses)


def test_missing_interface_lists_those_available_with_addresses() -> None:
    with pytest.raises(AddressError) as caught:
        interface_address("nope0")
    text = str(caught.value)
    assert "'nope0' (DMLC_INTERFACE) does not exist" in text and f"{LOOPBACK} (127.0.0.1" in text
    assert "DMLC_NODE_HOST" in text


def test_interface_without_address_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "interfaces", lambda: {"dummy": []})
    with pytest.raises(AddressError, match=r"'dummy'.*has no address; available: dummy \(no address\)"):
        interface_address("dummy")
    assert describe({}) == "none"
