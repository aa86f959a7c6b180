"""What users of other stores ran into, over real processes: host names, interfaces, ports."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

import kvstore

if TYPE_CHECKING:  # of the prelude that every worker's script begins with
    caught: Any = None
    tell: Any = None
    wait_for: Any = None

ENV = {"KVSTORE_TRANSPORT": "tcp", "KVSTORE_TIMEOUT": "50"}
HOST_NAME = socket.gethostname()
SOON = 25.0
"""Seconds, on a busy machine, for what does not wait for any timeout."""


def train() -> Any:
    """A round; returns the sum's smallest element and the endpoints that the servers announce."""
    from kvstore.config import read_config
    from kvstore.server.status import ask_job

    with kvstore.create("dist_sync") as kv:
        kv.init("w", np.zeros(1000, np.float32))
        value = kv.pushpull("w", np.ones(1000, np.float32))
        processes = ask_job(read_config(), 5.0).scheduler.processes
        kv.barrier()
        return [float(value.min()), [process.endpoint for process in processes if process.role == "server"]]


def free_ports(count: int) -> range:
    """Ports in a row that are free, below those that systems give away themselves."""
    for _ in range(100):
        first = random.randrange(20_000, 30_000)
        ports = range(first, first + count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as taken:
            for port in ports:
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            return ports
    raise AssertionError("no free ports")


def listening(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    """TCP sockets that these processes listen on, as the system tells."""
    found = set()
    for process in processes:
        for one in process.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                found.add((one.laddr.ip, one.laddr.port))
    return found


# --- R42: bind and advertise --------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", HOST_NAME, "[::1]"])  # and by address in all other tests
def test_r42_the_scheduler_may_be_named_in_every_way(run_job: Any, host: str) -> None:
    result = run_job(train, workers=1, servers=1, env=ENV, options=["--host", host])
    [[value, [endpoint]]] = result.ok()
    assert value == 1.0
    announced, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    assert announced == ("[::1]" if host == "[::1]" else "127.0.0.1"), endpoint
    assert int(port) > 0


@contextlib.contextmanager
def forwarder(host: str, to: tuple[str, int]) -> Iterator[int]:
    """Passes connections on, as a cluster's virtual address does. Yields its port."""

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = listener.accept()[0], socket.create_connection(to)
                opened.extend(ends)
                for pair in (ends, ends[::-1]):
                    copier = threading.Thread(target=copy, args=pair)
                    copier.start()
                    threads.append(copier)

    opened: list[socket.socket] = []
    with socket.create_server((host, 0)) as listener:
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        threads[0].join(5.0)
    for end in opened:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(5.0)
    for end in opened:
        end.close()


def test_r42_a_virtual_address_works_with_the_bind_option(by_hand: Any) -> None:
    virtual = "127.0.0.77"
    by_hand.scheduler(1, 1, "--host", "127.0.0.1", env={**ENV, "DMLC_PS_ROOT_URI": virtual})
    with forwarder(virtual, ("127.0.0.1", int(by_hand.environment["DMLC_PS_ROOT_PORT"]))) as port:
        by_hand.environment["DMLC_PS_ROOT_PORT"] = str(port)
        server = by_hand.server(0)
        worker = by_hand.worker("worker", train, DMLC_WORKER_ID="0")
        assert by_hand.ended(worker) == [0], (by_hand.folder / "worker.output").read_text()
        assert by_hand.ended(server) == [0]
    assert by_hand.result("worker")[0] == 1.0


def test_r42_an_address_of_another_machine_names_the_bind_option(end_of: Callable[..., tuple[int, str, float]]) -> None:
    arguments = ["scheduler", "-n", "1", "-s", "1", "--port", "0", "--root-uri"]
    code, output, _ = end_of(*arguments, "203.0.113.7", "--insecure")
    assert code == 2 and "203.0.113.7" in output and "Traceback" not in output
    assert "--host" in output and "KVSTORE_BIND_HOST" in output, output
    code, output, _ = end_of(*arguments, "203.0.113.7")
    assert code == 2 and "--insecure" in output


# --- R43: the wrong interface -------------------------------------------------------------------------------------


def test_r43_the_interface_and_the_node_host_decide_what_is_announced(run_job: Any) -> None:
    lo = run_job(train, workers=1, servers=1, env=ENV, options=["--interface", "lo"])
    [[value, [endpoint]]] = lo.ok()
    assert value == 1.0 and endpoint.startswith("tcp://127.0.0.1:")
    options = ["--interface", "lo", "--server-env", "DMLC_NODE_HOST=localhost"]
    [[value, [endpoint]]] = run_job(train, workers=1, servers=1, env=ENV, options=options).ok()
    assert value == 1.0 and endpoint.startswith("tcp://localhost:")


def test_r43_an_interface_that_does_not_exist_lists_those_that_do(run_job: Any) -> None:
    began = time.monotonic()
    result = run_job(train, workers=1, servers=1, env=ENV, options=["--interface", "nope7", "--grace", "0.5"])
    assert result.code not in (0, None) and time.monotonic() - began < SOON
    assert "'nope7' (DMLC_INTERFACE) does not exist" in result.output and "lo (127.0.0.1" in result.output
    servers = [line for line in result.output.splitlines() if line.startswith("server")]
    assert servers and not any("Traceback" in line for line in servers)  # the worker may be told, and raises


# --- R44: ports ---------------------------------------------------------------------------------------------------


def test_r44_an_occupied_port_is_named_and_nothing_is_left(run_job: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        result = run_job(train, workers=1, servers=1, env=ENV, options=["--port", str(port)])
    assert result.code not in (0, None) and time.monotonic() - began < SOON
    assert str(port) in result.output and "in use" in result.output.lower() and "Traceback" not in result.output


def hold() -> Any:
    with kvstore.create("dist_sync") as kv:
        kv.init("w", np.zeros(1000, np.float32))
        value = kv.pushpull("w", np.ones(1000, np.float32))
        tell(f"holding{kv.rank}")
        wait_for("end")
        kv.barrier()
        return float(value.min())


def test_r44_two_jobs_at_once_with_fixed_and_with_free_ports(run_job: Any) -> None:
    root, *ports = free_ports(21)
    options = ["--port", str(root), "--server-env", f"KVSTORE_PORT={ports[0]}-{ports[-1]}"]
    with (
        run_job.start(hold, workers=1, servers=2, env=ENV, options=options) as fixed,
        run_job.start(hold, workers=1, servers=1, env=ENV) as free,
    ):
        for job in (fixed, free):
            job.wait_for("holding0")
        assert listening(fixed.processes("scheduler")) == {("127.0.0.1", root)}
        own = listening(fixed.processes("server"))
        assert len(own) == 2 and all(host == "127.0.0.1" and port in ports for host, port in own), own
        assert listening(fixed.processes("worker")) == set()
        for job in (fixed, free):
            job.tell("end")
        assert fixed.finish().ok() == free.finish().ok() == [1.0]


def test_r44_a_server_says_which_ports_are_taken(end_of: Callable[..., tuple[int, str, float]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        job = ("-n", "1", "-s", "1", "--root-uri", "127.0.0.1", "--root-port", "9", "--transport", "tcp")
        code, output, seconds = end_of("server", *job, "--port", port)
    assert code == 2 and port in output and seconds < SOON and "Traceback" not in output
