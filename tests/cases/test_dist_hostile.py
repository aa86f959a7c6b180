"""What users of other stores ran into, over real processes: code in messages and files, and who can reach a port."""

from __future__ import annotations

import io
import os
import pickle
import random
import socket
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import psutil
import zmq

import kvstore
from kvstore.config import Config
from kvstore.messages import (
    AskStatus,
    Assign,
    AssignEntry,
    ChunkEntry,
    Message,
    Pull,
    Push,
    PushEntry,
    Register,
    Role,
    SetOptimizer,
)
from kvstore.server.status import ask_job, ask_status
from kvstore.wire import Limits, Wire

if TYPE_CHECKING:  # of the prelude that every worker's script begins with
    FOLDER: Path = None  # type: ignore[assignment]
    caught: Any = None
    tell: Any = None
    wait_for: Any = None

ENV = {"KVSTORE_TRANSPORT": "tcp", "KVSTORE_CHUNK_ELEMENTS": "64"}


class Marker:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def hostile_messages(job: str, marker: Path, seed: int) -> list[list[bytes]]:
    """Pickles in every place, random bytes, headers cut off or too large, and well-formed nonsense."""
    draw = random.Random(seed)
    code = pickle.dumps(Marker(marker))
    wire = Wire(job=job)

    def frames(message: Message, *payloads: bytes) -> list[bytes]:
        return [bytes(frame) for frame in wire.encode(message, payloads)]

    push = frames(Push(sequence=1, rank=0, entries=[PushEntry("other", 0, 9, "none", {})]), code)
    messages = [[code], [code, code], [b"", code], [code, b"", code], push, [*push, code], [push[0], code, code]]
    messages += [push[:1], [push[0], push[0]], [b""], [b"", b"", b""]]
    messages += [[push[0][:size], code] for size in range(1, len(push[0]), 7)]
    messages += [[draw.randbytes(size)] for size in (1, 2, 10, 100, 1000, 100_000)]
    messages += [[bytes([*push[0][:at], byte ^ 255, *push[0][at + 1 :]]), code] for at, byte in enumerate(push[0])]
    deep = b"\x91" * 100_000  # nested lists
    messages += [[deep], [b"\x81\xa4body" + deep], [b"\xdd\xff\xff\xff\xff"], [b"\xdf\xff\xff\xff\xff"]]
    messages += [[b"\xc6\xff\xff\xff\xff" + code], [b"\x00" * (Limits.header + 1)], [code] * 5000]
    messages += [
        frames(SetOptimizer(sequence=2, rank=0, turn=1, spec=code.decode("latin-1"), timeout=1.0)),
        frames(SetOptimizer(sequence=3, rank=10**6, turn=10**6, spec="{}", timeout=1.0)),
        frames(Push(sequence=4, rank=10**6, entries=[PushEntry("w", 0, 9, "none", {})]), code),
        frames(Push(sequence=5, rank=0, entries=[PushEntry("w", 10**6, 9, "none", {})]), code),
        frames(Push(sequence=6, rank=0, entries=[PushEntry("w", 0, 10**9, "os", {})]), code),
        frames(Pull(sequence=7, rank=0, entries=[ChunkEntry("w", 10**6, 1, 1)], timeout=1.0)),
        frames(Register(role=Role.SERVER, endpoint="tcp://[::1]:9", num_workers=2, num_servers=2, chunk_elements=64)),
        frames(
            Assign(sequence=8, rank=0, timeout=1.0, entries=[
                AssignEntry("big", 0, (1 << 40,), "float32", epoch=1, round=0, sync=True)
            ]), code,
        ),
    ]  # fmt: skip
    return messages


def attack(endpoint: str, messages: list[list[bytes]]) -> None:
    """Send all of it from one ZeroMQ socket, from sockets of their own, and as bytes that are no ZeroMQ at all."""
    context = zmq.Context()
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with context:
        for kind in (zmq.DEALER, zmq.REQ, zmq.ROUTER, zmq.PUSH, zmq.SUB):
            with context.socket(kind) as other:
                other.setsockopt(zmq.LINGER, 0)
                other.connect(endpoint)
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 2000)
            dealer.connect(endpoint)
            for message in messages:
                dealer.send_multipart(message)
    for raw in (b"", b"GET / HTTP/1.1\r\n\r\n", messages[0][0], bytes(1000), b"\xff" * 1000):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(raw)


def train_beside_strangers() -> Any:
    kv = kvstore.create("dist_sync")
    kv.init("w", np.zeros(500, np.float32))
    kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
    ones = np.ones(500, np.float32)
    values = [kv.pushpull("w", ones)]
    tell(f"ready{kv.rank}")
    while not (FOLDER / "attacked").exists():
        values.append(kv.pushpull("w", ones))
        kv.barrier()
    wait_for("attacked")
    kv.save_optimizer_states(FOLDER / "states")
    kv.barrier()
    refused = [
        [caught(load, FOLDER / name) for load in (kv.load_optimizer_states, kv.load)]
        for name in ("crafted", "crafted.npz", "crafted.pt")
    ]
    values.append(kv.pushpull("w", ones))
    kv.barrier()
    kv.close()
    momentum, weight, exact = 0.0, 0.0, True
    for value in values:
        momentum = 0.5 * momentum - kv.num_workers
        weight += momentum
        exact = exact and bool((value == np.float32(weight)).all())
    return [refused, exact, len(values)]


def test_r50_nothing_that_arrives_is_executed_and_the_job_goes_on(run_job: Any, tmp_path: Path) -> None:
    marker, seed = tmp_path / "executed", random.randrange(1 << 16)
    with run_job.start(train_beside_strangers, workers=2, servers=2, env=ENV) as job:
        job.wait_for("ready0")
        job.wait_for("ready1")
        roles = ("scheduler", "server", "worker")
        own = [process for role in roles for process in job.processes(role)]
        listening = [(one.laddr.ip, one.laddr.port) for process in own for one in process.net_connections("tcp")
                     if one.status == psutil.CONN_LISTEN]  # fmt: skip
        assert len(listening) == 3 and {host for host, _ in listening} == {"127.0.0.1"}, listening
        (root,) = job.processes("scheduler")[0].net_connections("tcp")[:1]
        config = Config(root_uri="127.0.0.1", root_port=root.laddr.port, num_workers=2, num_servers=2)
        scheduler = ask_job(config, 30.0).scheduler
        messages = hostile_messages(scheduler.job, marker, seed)
        for host, port in listening:
            attack(f"tcp://{host}:{port}", messages)
        for host, port in listening:
            assert ask_status(f"tcp://{host}:{port}", 30.0).job == scheduler.job
        for name in ("crafted", "crafted.npz", "crafted.pt"):
            (job.folder / name).write_bytes(crafted_file(name, marker))
        job.tell("attacked")
        result = job.finish()
    for refused, exact, rounds in result.ok():
        assert exact and rounds >= 2, f"seed {seed}"
        for error in [error for pair in refused for error in pair]:
            assert error is not None and error[0] == "CheckpointError", refused
    assert not marker.exists(), f"seed {seed}"


def crafted_file(name: str, marker: Path) -> bytes:
    """A file that programs which unpickle state would execute: a pickle, an array of objects, a zip with a pickle."""
    code, file = pickle.dumps(Marker(marker)), io.BytesIO()
    if name.endswith(".npz"):
        np.savez(file, allow_pickle=True, state=np.array([Marker(marker)], dtype=object))
    elif name.endswith(".pt"):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", code)
    return file.getvalue() or code


def test_the_pickle_of_these_tests_would_do_harm(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Marker(tmp_path / "executed")))  # noqa: S301
    assert (tmp_path / "executed").exists()


def test_the_hostile_messages_are_what_they_say(tmp_path: Path) -> None:
    messages = hostile_messages("job", tmp_path, 1)
    readable = []
    for message in messages:
        try:
            readable.append(type(Wire().decode(message)[0]))
        except kvstore.KVStoreError:
            continue
    assert {Push, Pull, Assign, SetOptimizer, Register} <= set(readable) and len(readable) < len(messages) / 2
    assert msgspec.msgpack.decode(Wire().encode(AskStatus(sequence=1))[0])["v"]
