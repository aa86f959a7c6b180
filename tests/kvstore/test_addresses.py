"""Which address is bound, which advertised, which connected to; no network is used beyond loopback."""

import socket
from pathlib import Path
from typing import Any

import pytest

from kvstore import addresses as module
from kvstore import interfaces as interfaces_module
from kvstore.addresses import (
    IPC_ANYWHERE,
    advertise,
    advertised_host,
    bind_endpoints,
    choose_endpoint,
    host_fingerprint,
    join_tcp,
    parse_ports,
    resolve,
    scheduler_endpoint,
    split_tcp,
)
from kvstore.config import Config, TransportName
from kvstore.errors import AddressError, ParameterError
from kvstore.messages import Role

HERE = socket.gethostname()
FAMILY_OF = {
    "lan-name": [(socket.AF_INET6, "fd00::7"), (socket.AF_INET, "10.0.0.7")],
    HERE: [(socket.AF_INET, "10.0.0.1")],
}


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with lo and eth9 (10.0.0.1), whose route to everywhere leaves by eth9; names resolve as in FAMILY_OF."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *arguments: Any, **keywords: Any) -> Any:
        if host in FAMILY_OF:
            return [(family, 1, 6, "", (address, 0)) for family, address in FAMILY_OF[host]]
        if host == "nohost":
            raise socket.gaierror(-2, "Name or service not known")
        return real(host, *arguments, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    known = {"lo": ["127.0.0.1", "::1"], "eth9": ["10.0.0.1", "fd00::1"]}
    monkeypatch.setattr(module, "interfaces", lambda: known)
    monkeypatch.setattr(interfaces_module, "interfaces", lambda: known)
    monkeypatch.setattr(
        module, "_address_towards", lambda scheduler, config: "fd00::1" if ":" in scheduler else "10.0.0.1"
    )


def config(root: str = "127.0.0.1", role: Role = Role.SERVER, **more: Any) -> Config:
    return Config(role=role, root_uri=root, root_port=9000, num_workers=1, num_servers=1, **more)


@pytest.mark.parametrize(
    ("root", "more", "expected"),
    [
        ("127.0.0.1", {}, "127.0.0.1"),
        ("localhost", {}, "127.0.0.1"),
        (HERE, {}, "127.0.0.1"),
        (HERE.upper(), {}, "127.0.0.1"),
        ("::1", {}, "::1"),
        ("[::1]", {}, "::1"),
        (HERE, {"insecure": True}, "10.0.0.1"),
        ("10.0.0.9", {}, "10.0.0.1"),
        ("fd00::9", {}, "fd00::1"),
        ("lan-name", {}, "10.0.0.1"),
        ("10.0.0.9", {"interface": "lo"}, "127.0.0.1"),
        ("[fd00::9]", {"interface": "lo"}, "::1"),
        ("10.0.0.9", {"interface": "eth9", "node_host": "192.168.5.5"}, "192.168.5.5"),
        ("10.0.0.9", {"node_host": "[fd00::5]"}, "fd00::5"),
        ("10.0.0.9", {"node_host": "public.example", "bind_host": "0.0.0.0"}, "public.example"),
    ],
)
def test_advertised_host(root: str, more: dict[str, Any], expected: str) -> None:
    assert advertised_host(config(root, **more)) == expected


def test_node_host_that_means_everywhere_is_refused() -> None:
    for host in ("0.0.0.0", "::", "[::]"):
        with pytest.raises(AddressError, match=r"DMLC_NODE_HOST .* eth9 \(10.0.0.1"):
            advertised_host(config(node_host=host))


def test_missing_interface_lists_those_available() -> None:
    with pytest.raises(AddressError, match=r"'ib0'.*does not exist; available: lo \(127.0.0.1, ::1\), eth9"):
        advertised_host(config("10.0.0.9", interface="ib0"))


@pytest.mark.parametrize("role", [Role.WORKER, Role.SERVER, Role.SCHEDULER])
def test_unresolvable_scheduler_names_role_variable_and_address(role: Role) -> None:
    with pytest.raises(AddressError, match=rf"{role}: DMLC_PS_ROOT_URI 'nohost' .* does not resolve") as caught:
        scheduler_endpoint(config("nohost", role))
    assert (caught.value.address, caught.value.role) == ("nohost", role)


@pytest.mark.parametrize(
    ("root", "expected"),
    [("localhost", "tcp://127.0.0.1:9000"), ("[::1]", "tcp://[::1]:9000"), ("::1", "tcp://[::1]:9000"),
     ("lan-name", "tcp://10.0.0.7:9000"), (HERE, "tcp://127.0.0.1:9000")],
)  # fmt: skip
def test_scheduler_endpoint_is_numeric_with_brackets(root: str, expected: str) -> None:
    assert scheduler_endpoint(config(root)) == expected


@pytest.mark.parametrize(
    ("root", "more", "expected"),
    [
        ("localhost", {}, ["tcp://127.0.0.1:9000"]),
        ("[::1]", {}, ["tcp://[::1]:9000"]),
        (HERE, {}, ["tcp://127.0.0.1:9000"]),
        ("10.0.0.1", {"insecure": True}, ["tcp://10.0.0.1:9000"]),
        (HERE, {"insecure": True}, ["tcp://10.0.0.1:9000", "tcp://127.0.0.1:9000"]),
        ("10.96.0.1", {"insecure": True, "bind_host": "0.0.0.0"}, ["tcp://0.0.0.0:9000"]),
        ("fd00::5", {"insecure": True, "bind_host": "::"}, ["tcp://[::]:9000"]),
        (HERE, {"insecure": True, "bind_host": "0.0.0.0"}, ["tcp://0.0.0.0:9000"]),
        ("10.96.0.1", {"bind_host": "127.0.0.1", "transport": TransportName.IPC}, ["tcp://127.0.0.1:9000"]),
    ],
)
def test_where_a_scheduler_binds(root: str, more: dict[str, Any], expected: list[str]) -> None:
    assert bind_endpoints(config(root, Role.SCHEDULER, **more)) == expected


@pytest.mark.parametrize(
    ("root", "more", "expected"),
    [
        ("localhost", {}, ["tcp://127.0.0.1:0", IPC_ANYWHERE]),
        ("localhost", {"port": "9100-9110"}, ["tcp://127.0.0.1:9100-9110", IPC_ANYWHERE]),
        ("localhost", {"transport": TransportName.TCP}, ["tcp://127.0.0.1:0"]),
        ("localhost", {"transport": TransportName.IPC}, [IPC_ANYWHERE]),
        ("10.0.0.9", {"insecure": True, "transport": TransportName.TCP}, ["tcp://10.0.0.1:0"]),
        ("10.0.0.9", {"insecure": True, "bind_host": "::", "transport": TransportName.TCP}, ["tcp://[::]:0"]),
        ("10.0.0.9", {"interface": "lo", "transport": TransportName.TCP}, ["tcp://127.0.0.1:0"]),
    ],
)
def test_where_a_server_binds(root: str, more: dict[str, Any], expected: list[str]) -> None:
    assert bind_endpoints(config(root, **more)) == expected


@pytest.mark.parametrize(
    "closed",
    [config("10.0.0.9"), config(bind_host="0.0.0.0"), config(bind_host="::"), config("10.0.0.1", Role.SCHEDULER),
     config("localhost", Role.SCHEDULER, bind_host="0.0.0.0")],
    ids=repr,
)  # fmt: skip
def test_binding_beyond_loopback_must_be_said_aloud(closed: Config) -> None:
    with pytest.raises(AddressError, match=r"not a loopback address.*--insecure \(KVSTORE_INSECURE=1\)"):
        bind_endpoints(closed)


def test_advertised_endpoint_is_never_everywhere() -> None:
    open_config = config("10.0.0.9", bind_host="0.0.0.0", insecure=True)
    assert advertise(open_config, ["tcp://0.0.0.0:4711"]) == "tcp://10.0.0.1:4711"
    both = advertise(config(), ["tcp://127.0.0.1:4711", "ipc:///run/x/socket"])
    assert both == f"tcp://127.0.0.1:4711|ipc:///run/x/socket#{host_fingerprint()}"


def test_choice_between_tcp_and_ipc(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path.touch()
    near = f"tcp://localhost:4711|ipc://{path}#{host_fingerprint()}"
    far = f"tcp://lan-name:4711|ipc://{path}#0123456789abcdef"
    gone = f"tcp://[::1]:4711|ipc://{path}.gone#{host_fingerprint()}"
    assert choose_endpoint(near, config()) == f"ipc://{path}"
    assert choose_endpoint(far, config()) == "tcp://10.0.0.7:4711"
    assert choose_endpoint(gone, config()) == "tcp://[::1]:4711"
    assert choose_endpoint(near, config(transport=TransportName.TCP)) == "tcp://127.0.0.1:4711"
    ipc = config(transport=TransportName.IPC)
    assert choose_endpoint(near, ipc) == f"ipc://{path}"
    assert choose_endpoint("tcp://127.0.0.1:9000", ipc) == "tcp://127.0.0.1:9000"  # the scheduler is always on tcp
    for offer in (far, gone, far.partition("|")[2]):
        with pytest.raises(AddressError, match=r"cannot be reached by ipc.*KVSTORE_TRANSPORT=auto"):
            choose_endpoint(offer, ipc)


def test_fingerprint_depends_on_boot_and_is_stable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "boot_id"
    other.write_text("another boot\n")
    first = host_fingerprint()
    monkeypatch.setattr(module, "_BOOT_ID", other)
    assert host_fingerprint.__wrapped__() != first == host_fingerprint()
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "absent")
    assert host_fingerprint.__wrapped__().startswith("?")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", range(1)),
        ("9000", range(9000, 9001)),
        ("9000-9002", range(9000, 9003)),
        ("65535-65535", range(65535, 65536)),
    ],
)
def test_ports(text: str, expected: range) -> None:
    assert parse_ports(text) == expected


@pytest.mark.parametrize(
    "text", ["", "-1", "http", "9000-", "-9000", "9001-9000", "65536", "1-70000", "0-5", "٣", "1 - 2"]
)
def test_malformed_ports_name_the_variable(text: str) -> None:
    with pytest.raises(ParameterError, match="KVSTORE_PORT") as caught:
        parse_ports(text)
    assert caught.value.given == text
    if text:
        with pytest.raises(ParameterError):
            bind_endpoints(config(port=text))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "name.example"])
def test_endpoint_text_round_trip(host: str) -> None:
    assert split_tcp(join_tcp(host, "80")) == (host, "80")
    assert join_tcp(f"[{host}]", "80") == join_tcp(host, "80")


@pytest.mark.parametrize("text", ["", "tcp://", "tcp://host", "udp://host:1", "tcp://:5", "tcp://host:"])
def test_malformed_endpoints(text: str) -> None:
    with pytest.raises(AddressError):
        split_tcp(text)


def test_ipv4_comes_first_where_a_name_has_both() -> None:
    assert resolve("lan-name", Role.WORKER) == "10.0.0.7"


def test_route_to_the_scheduler_without_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert module._address_towards("127.0.0.1", config()) == "127.0.0.1"

    class NoRoute(socket.socket):
        def connect(self, address: Any, /) -> None:
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", NoRoute)
    monkeypatch.setattr(module, "_available", lambda: "interfaces: lo (127.0.0.1)")
    with pytest.raises(
        AddressError, match=r"no route to the scheduler at 10.9.9.9.*unreachable.*DMLC_NODE_HOST.*lo \("
    ):
        advertised_host(config("10.9.9.9"))
