"""What users of other stores ran into, over real processes: coming together, ranks, wrong addresses, roles."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

import kvstore
from kvstore.errors import AddressError, ConfigError, JoinError, NotSupportedError, ParameterError, UnknownNameError

if TYPE_CHECKING:  # of the prelude that every worker's script begins with
    caught: Any = None
    report: Any = None
    tell: Any = None
    wait_for: Any = None

ENV = {"KVSTORE_TIMEOUT": "50"}
SOON = 20.0
"""Seconds, on a busy machine, for what does not wait for any timeout."""


@pytest.fixture
def closed_port() -> Iterator[Callable[[str], int]]:
    """`closed_port(host)`: a port that is taken during the test, where nothing listens."""
    with contextlib.ExitStack() as taken:

        def take(host: str) -> int:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            one = taken.enter_context(socket.socket(family))
            one.bind((host, 0))
            port: int = one.getsockname()[1]
            return port

        yield take


# --- R36: ranks and disagreement about the size -------------------------------------------------------------------


def tell_rank() -> Any:
    with kvstore.create("dist_sync") as kv:
        kv.barrier()
        return kv.rank


def test_r36_the_rank_is_the_given_id_whatever_the_order(by_hand: Any) -> None:
    seed = random.randrange(1 << 16)
    order = list(range(4))
    random.Random(seed).shuffle(order)
    by_hand.scheduler(4, 1, env=ENV)
    workers = [by_hand.worker(f"worker{rank}", tell_rank, DMLC_WORKER_ID=str(rank)) for rank in order]
    by_hand.server(0)
    assert by_hand.ended(*workers) == [0] * 4
    assert [by_hand.result(f"worker{rank}") for rank in range(4)] == [0, 1, 2, 3], f"seed {seed}, order {order}"


def try_to_join() -> Any:
    began = time.monotonic()
    return [caught(kvstore.create, "dist_sync"), time.monotonic() - began]


def stay() -> Any:
    tell(f"here{os.environ['DMLC_WORKER_ID']}")
    with kvstore.create("dist_sync") as kv:
        tell(f"joined{kv.rank}")
        wait_for("end")
        kv.barrier()
        return kv.rank


def test_r36_who_does_not_fit_is_refused_and_the_job_goes_on(by_hand: Any) -> None:
    by_hand.scheduler(2, 1, env=ENV)
    by_hand.server(0)
    first = by_hand.worker("first", stay, DMLC_WORKER_ID="0")
    by_hand.wait_for("here0")
    other_count = by_hand.worker("count", try_to_join, DMLC_WORKER_ID="1", DMLC_NUM_WORKER="3")
    assert by_hand.ended(other_count) == [0]
    # Of two with the same id the later one is refused: either of these, and the other one completes the job.
    twins = [by_hand.worker(f"twin{number}", try_to_join_and_stay, DMLC_WORKER_ID="1") for number in range(2)]
    by_hand.wait_for("joined0")
    surplus = by_hand.worker("surplus", try_to_join)
    assert by_hand.ended(surplus) == [0]
    by_hand.tell("end")
    assert by_hand.ended(first, *twins) == [0] * 3
    assert by_hand.result("first") == 0

    (name, text, _), took = by_hand.result("count")
    assert name == "MismatchError" and took < SOON
    assert "DMLC_NUM_WORKER=3" in text and "DMLC_NUM_WORKER=2" in text
    [refused] = [found for twin in range(2) if (found := by_hand.result(f"twin{twin}")) != 1]
    (name, text, facts), took = refused
    assert name == "JoinError" and facts["rank"] == 1 and took < SOON, refused
    assert "rank 1" in text or "comes too late" in text
    (name, text, _), took = by_hand.result("surplus")
    assert name == "JoinError" and took < SOON
    assert "comes too late" in text and "DMLC_NUM_WORKER=2" in text


def try_to_join_and_stay() -> Any:
    began = time.monotonic()
    try:
        kv = kvstore.create("dist_sync")
    except kvstore.KVStoreError as error:
        return [[type(error).__name__, str(error), error.facts], time.monotonic() - began]
    wait_for("end")
    kv.barrier()
    kv.close()
    return kv.rank


def test_r36_r40_create_says_who_is_missing_and_times_out(by_hand: Any) -> None:
    by_hand.scheduler(2, 2, env=ENV)
    by_hand.server(1)
    by_hand.wait_until_registered(1)
    worker = by_hand.worker("worker", try_to_join, DMLC_WORKER_ID="0", KVSTORE_TIMEOUT="4")
    assert by_hand.ended(worker) == [0]
    missing = "1 of 2 servers and 1 of 2 workers registered; missing: server 0; worker 1"
    assert missing in (by_hand.folder / "worker.output").read_text(), "it says so while it waits"
    (name, text, facts), took = by_hand.result("worker")
    assert name == "JoinError" and 3.5 < took < 4 + SOON, took
    assert missing in text and facts["role"] == "worker"
    address = f"127.0.0.1:{by_hand.environment['DMLC_PS_ROOT_PORT']}"
    assert address in text and address in facts["address"]
    server = by_hand.server(0, KVSTORE_TIMEOUT="0.5")
    assert by_hand.ended(server) == [1], "a server does not wait for ever either"


# --- R40: a wrong address -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_r40_an_address_where_nothing_listens_ends_in_time(host: str, closed_port: Callable[[str], int]) -> None:
    port = closed_port(host)
    began = time.monotonic()
    with pytest.raises(JoinError) as raised:
        kvstore.create("dist_sync", root_uri=host, root_port=port, num_workers=1, num_servers=1, timeout=0.5)
    assert time.monotonic() - began < SOON
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    assert shown in str(raised.value) and raised.value.role == "worker"
    for part in ("scheduler", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "kvstore-server check"):
        assert part in str(raised.value)


def test_r40_a_name_that_does_not_resolve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> None:  # the machine's own name service may take its time
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    began = time.monotonic()
    with pytest.raises(AddressError, match=r"worker: DMLC_PS_ROOT_URI 'no-such-host.invalid'") as raised:
        kvstore.create("dist_sync", root_uri="no-such-host.invalid", root_port=9, num_workers=1, num_servers=1)
    assert raised.value.address == "no-such-host.invalid" and time.monotonic() - began < SOON


def test_r40_check_tells_what_is_reachable(
    by_hand: Any, end_of: Callable[..., tuple[int, str, float]], closed_port: Callable[[str], int]
) -> None:
    port = str(closed_port("127.0.0.2"))
    code, output, _ = end_of("check", "--root-uri", "127.0.0.2", "--root-port", port, "--timeout", "1")
    assert code == 1 and "scheduler" in output and "127.0.0.2" in output
    code, output, _ = end_of("check", "--root-uri", "no-such-host.invalid", "--root-port", "9", "--timeout", "1")
    assert code != 0 and "no-such-host.invalid" in output and "Traceback" not in output

    by_hand.scheduler(1, 1, env=ENV)
    root = {name: by_hand.environment[name] for name in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")}
    worker = by_hand.worker("worker", stay, DMLC_WORKER_ID="0")
    by_hand.wait_for("here0")
    code, output, _ = end_of("check", "--timeout", "20", **root)
    assert code == 1 and "has not registered" in output
    by_hand.server(0)
    by_hand.wait_for("joined0")
    code, output, _ = end_of("check", "--timeout", "20", **root)
    assert code == 0 and "server 0" in output and "worker 0" in output, output
    by_hand.tell("end")
    assert by_hand.ended(worker) == [0]


# --- R49: roles and missing variables -----------------------------------------------------------------------------


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A shell without any variable of a job."""
    for name in list(os.environ):
        if name.startswith(("DMLC_", "KVSTORE_")):
            monkeypatch.delenv(name)
    yield monkeypatch


@pytest.mark.parametrize("role", ["worker", "server", "scheduler", "nonsense"])
def test_r49_import_never_blocks(role: str) -> None:
    environment = {**os.environ, "DMLC_ROLE": role, "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "x"}
    done = subprocess.run([sys.executable, "-c", "import kvstore"], env=environment, timeout=60, check=False)
    assert done.returncode == 0


def test_r49_missing_variables_are_listed_with_the_launch_command(plain: pytest.MonkeyPatch) -> None:
    plain.setenv("DMLC_NUM_SERVER", "2")
    with pytest.raises(ConfigError) as raised:
        kvstore.create("dist_sync")
    for part in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "kvstore-server launch -n"):
        assert part in str(raised.value)
    assert "DMLC_NUM_SERVER" not in str(raised.value), "this one is there"


@pytest.mark.parametrize(
    ("variable", "value", "kind", "parts"),
    [
        ("DMLC_PS_ROOT_PORT", "http", ParameterError, ["DMLC_PS_ROOT_PORT", "'http'"]),
        ("DMLC_PS_ROOT_PORT", "70000", ParameterError, ["DMLC_PS_ROOT_PORT", "70000", "65535"]),
        ("DMLC_NUM_SERVER", "0", ParameterError, ["DMLC_NUM_SERVER", "at least 1"]),
        ("DMLC_NUM_WORKER", "-1", ParameterError, ["DMLC_NUM_WORKER", "-1"]),
        ("DMLC_ROLE", "wroker", ParameterError, ["DMLC_ROLE", "wroker"]),
        ("DMLC_ROLE", "server", NotSupportedError, ["DMLC_ROLE", "kvstore-server server"]),
        ("DMLC_WORKER_ID", "3", ParameterError, ["DMLC_WORKER_ID", "3", "0 to 1"]),
    ],
)
def test_r49_wrong_settings_are_named(
    plain: pytest.MonkeyPatch, variable: str, value: str, kind: type[Exception], parts: list[str]
) -> None:
    settings = {
        "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1",
        variable: value,
    }  # fmt: skip
    for name, text in settings.items():
        plain.setenv(name, text)
    with pytest.raises(kind) as raised:
        kvstore.create("dist_sync")
    for part in parts:
        assert part in str(raised.value)


def test_r49_an_unknown_store_comes_with_near_names(plain: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match=r"'dist_snyc'.*nearest first: dist_sync, dist_async"):
        kvstore.create("dist_snyc")


def attributes(name: str) -> Any:
    with kvstore.create(name.upper()) as kv:
        try:
            kv.num_dead_node("boss")
        except kvstore.KVStoreError as error:
            return [kv.type, kv.rank, kv.num_workers, type(error).__name__]


def test_r49_rank_workers_and_type_are_right_on_all_stores(run_job: Any) -> None:
    assert [attributes(name) for name in ("local", "device")] == [
        [name, 0, 1, "ParameterError"] for name in ("local", "device")
    ]
    for name in ("dist_async", "dist_device_sync"):
        found = run_job(attributes, workers=2, servers=1, env=ENV, args={"name": name}).ok()
        assert found == [[name, rank, 2, "ParameterError"] for rank in (0, 1)]
