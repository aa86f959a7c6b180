"""The ZeroMQ transport; the only file of the product that imports zmq.

One ROUTER takes incoming connections, one DEALER stands for each name given to `connect`; all carry the node id as
identity. A message that a DEALER cannot deliver yet waits for the peer; whether the peer lives is known from answers.

Measured with pyzmq 27 on a 2-core host: one poll over all sockets takes 1.7 us, a failed receive 3.8 us, so receiving
polls first. A view of a received frame takes 1 us at any size, a copy 40 us at 256 KB. Sending without a copy takes
some 8 us for the hand-back of the buffer, a copy of 64 KB about as long: hence `_COPY_BELOW`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import shutil
import socket as stdlib_socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

import zmq

from kvstore.addresses import IPC_ANYWHERE, choose_endpoint, join_tcp, parse_ports, split_tcp
from kvstore.config import Config
from kvstore.errors import AddressError, ClosedError
from kvstore.messages import Frame

_COPY_BELOW = 65536
_BATCH = 16
"""Messages taken from one socket before the others get their turn, and at most that many sockets' worth per receive."""
_RECONNECT_MS, _RECONNECT_MAX_MS = 20, 1000
_IPC_PATH_LIMIT = 107
_UNREACHABLE = (zmq.EHOSTUNREACH, zmq.EAGAIN)
_NOT_LOCAL = (errno.EADDRNOTAVAIL, errno.ENODEV)
_forks = 0
"How often this process was forked from another since this module was loaded: cheaper to ask than the process id."
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK, _MORE, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.RCVMORE), int(zmq.NOBLOCK | zmq.SNDMORE)


class ZmqTransport:
    """See `kvstore.transport.Transport`. Settings read: limits, heartbeat, dead_after, transport.

    A node id is 16 hex digits, the identity on the wire is the 8 bytes they stand for; the address of a foreign peer
    is its identity in hex too, so no peer can pass for a name given to `connect`.
    """

    def __init__(self, config: Config, node: str = "") -> None:
        self.node = node or _random_node()
        self._config = config
        self._frame_limit = config.limits.frames
        self._forks = _forks
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._endpoints: dict[str, str] = {}
        self._names: dict[object, str] = {}
        self._folders: list[str] = []
        self._closed = False
        self._wake_in, self._wake_out = stdlib_socket.socketpair()
        self._wake_fd = self._wake_out.fileno()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._woken = False
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def bind(self, endpoint: str) -> str:
        """Listen on 'tcp://HOST:PORT', 'tcp://HOST:FIRST-LAST' (first free port), 'ipc://PATH' or 'ipc://*'.

        May be called for several endpoints. Returns the real endpoint.

        Raises:
            AddressError: the port is in use, or the address is not one of this host.
            ClosedError: the transport is closed or was inherited through fork.
        """
        self._check_usable()
        if self._router is None:
            self._router = self._open(zmq.ROUTER)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting peer replaces its half-open connection
        candidates = [self._ipc_path()] if endpoint == IPC_ANYWHERE else _candidates(endpoint)
        for position, candidate in enumerate(candidates, start=1):
            try:
                self._router.setsockopt(zmq.IPV6, "[" in candidate)
                self._router.bind(candidate)
                return _real_endpoint(self._router)
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or position == len(candidates):
                    raise _bind_error(endpoint, error) from error
        raise AssertionError("unreachable: a range of ports is never empty")

    def connect(self, name: str, endpoint: str) -> None:
        """Connect to what a process advertises; see `kvstore.addresses.choose_endpoint` for the forms and errors.

        At most one name per process: a second connection of the same node takes the place of the first there.
        """
        self._check_usable()
        if self._endpoints.get(name) == endpoint:
            return
        chosen = choose_endpoint(endpoint, self._config)
        if name in self._dealers:
            self._drop(name)
        dealer = self._open(zmq.DEALER)
        dealer.setsockopt(zmq.IPV6, "[" in chosen)
        dealer.connect(chosen)
        self._dealers[name] = dealer
        self._endpoints[name] = endpoint
        self._names[dealer] = name

    def send(self, to: str, frames: Sequence[Frame]) -> bool:
        """Queue a message; frames of 64 KB and more are not copied and must not change any more.

        Returns:
            False if `to` is a peer whose connection is gone, or unknown. For a connected name the message waits
            until the peer can be reached: True.
        """
        self._check_usable()
        _check_sendable(frames)
        dealer = self._dealers.get(to)
        try:
            if dealer is not None:
                _send_frames(dealer, frames)
                return True
            identity = _identity(to)
            if self._router is None or identity is None:
                return False
            self._router.send(identity, _NOBLOCK_MORE)
            _send_frames(self._router, frames)
        except zmq.ZMQError as error:
            if error.errno not in _UNREACHABLE:
                raise
            return False
        return True

    def receive(self, timeout: float) -> list[tuple[str, list[Frame]]]:
        """Return the messages that have arrived; payload frames are read-only views of ZeroMQ's own buffers."""
        self._check_usable()
        found: list[tuple[str, list[Frame]]] = []
        for ready, _ in self._poller.poll(math.ceil(timeout * 1000)):
            if ready == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(4096)
                self._woken = False  # after the read: a wake from here on writes again
            else:
                self._drain(ready, found)
        return found

    def wake(self) -> None:
        """Make a waiting or the next `receive` return at once. For any thread and for signal handlers."""
        if self._woken or self._closed:
            return
        self._woken = True
        with contextlib.suppress(OSError):  # just closed by its owner; or full, which wakes just as well
            self._wake_in.send(b"w")

    def disconnect(self, name: str) -> None:
        """Drop the connection to a name, and what is queued for it."""
        if name in self._dealers:
            self._drop(name)

    def close(self, flush: float = 0.0) -> None:
        """Close; queued messages get `flush` seconds to leave. Does nothing the second time and in a forked child."""
        if self._closed or self._forks != _forks:
            return
        self._closed = True
        for socket in self._sockets():
            socket.close(linger=round(flush * 1000))
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _drain(self, socket: zmq.Socket[bytes], found: list[tuple[str, list[Frame]]]) -> None:
        name = self._names.get(socket)
        for _ in range(_BATCH):
            try:
                first = socket.recv(_NOBLOCK)
            except zmq.Again:  # its sender vanished between the poll and now
                return
            frames: list[Frame] = [] if name is None else [first]
            if socket.getsockopt(_MORE):
                self._take_rest(socket, frames)
            found.append((name or first.hex(), frames))
            if not int(socket.getsockopt(_EVENTS)) & _READABLE:
                return

    def _take_rest(self, socket: zmq.Socket[bytes], frames: list[Frame]) -> None:
        limit = self._frame_limit
        more: int | bytes | bool = True
        while more:
            if not frames:
                frames.append(socket.recv(_NOBLOCK))  # the header: small, and msgpack wants bytes
                more = socket.getsockopt(_MORE)
                continue
            frame = socket.recv(_NOBLOCK, copy=False)
            more = frame.more
            if len(frames) <= limit:  # one too many is kept, for the error that tells; a million are not
                frames.append(frame.buffer)

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        config = self._config
        socket = self._context.socket(kind)
        silent = config.dead_after / 2
        interval = min(config.heartbeat, silent / 2)
        options: dict[int, int | bytes] = {
            zmq.IDENTITY: bytes.fromhex(self.node),
            zmq.LINGER: 0,
            zmq.SNDHWM: 0,  # a ROUTER drops messages at its mark; credits bound what is in flight
            zmq.RCVHWM: 0,
            zmq.MAXMSGSIZE: max(config.limits.frame, config.limits.header),
            zmq.RECONNECT_IVL: _RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: _RECONNECT_MAX_MS,
            # Beaten by ZeroMQ's own thread: a stopped process is cut off after dead_after / 2, a busy one never.
            zmq.HEARTBEAT_IVL: _milliseconds(interval),
            zmq.HEARTBEAT_TIMEOUT: _milliseconds(silent - interval),
            zmq.HEARTBEAT_TTL: _milliseconds(silent),
        }
        for option, value in options.items():
            socket.setsockopt(option, value)
        socket.copy_threshold = _COPY_BELOW
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _drop(self, name: str) -> None:
        dealer = self._dealers.pop(name)
        del self._endpoints[name], self._names[dealer]
        self._poller.unregister(dealer)
        dealer.close(linger=0)

    def _sockets(self) -> list[zmq.Socket[bytes]]:
        return [*self._dealers.values(), *([self._router] if self._router is not None else [])]

    def _ipc_path(self) -> str:
        folder = tempfile.mkdtemp(prefix="kvstore-")  # mode 0700
        if len(f"{folder}/socket".encode()) > _IPC_PATH_LIMIT:
            Path(folder).rmdir()
            folder = tempfile.mkdtemp(prefix="kvstore-", dir="/tmp")
        self._folders.append(folder)
        return f"ipc://{folder}/socket"

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("this connection is closed")
        if self._forks != _forks:
            raise ClosedError("this connection belongs to the process that was forked: create a store in the child")


def _real_endpoint(socket: zmq.Socket[bytes]) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def _send_frames(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    last = len(frames) - 1
    for position, frame in enumerate(frames):
        socket.send(frame, _NOBLOCK if position == last else _NOBLOCK_MORE, copy=False, track=False)


def _check_sendable(frames: Sequence[Frame]) -> None:
    """An error in the middle of a message would glue the next one to it, so what can go wrong is asked before."""
    if not frames:
        raise ValueError("a message has at least one frame")
    for frame in frames:
        if type(frame) is memoryview and not frame.c_contiguous:
            raise ValueError("a frame must be contiguous")


def _identity(node: str) -> bytes | None:
    try:
        return bytes.fromhex(node)
    except ValueError:  # a name that was never connected
        return None


def _random_node() -> str:
    return f"{1 + secrets.randbelow(255):02x}{secrets.token_hex(7)}"  # ZeroMQ keeps identities that begin with 0


def _milliseconds(seconds: float) -> int:
    return min(max(round(seconds * 1000), 1), 6_000_000)  # the TTL is 16 bits of deciseconds on the wire


def _candidates(endpoint: str) -> list[str]:
    if not endpoint.startswith("tcp://"):
        return [endpoint]
    host, ports = split_tcp(endpoint)
    return [join_tcp(host, str(port)) for port in parse_ports(ports)]


def _bind_error(endpoint: str, error: zmq.ZMQError) -> AddressError:
    if error.errno == zmq.EADDRINUSE:
        trouble = "in use (every port of the range)" if "-" in endpoint.rpartition(":")[2] else "in use"
        advice = "Choose another port, or end the process that holds it: an earlier launch?"
    elif error.errno in _NOT_LOCAL:
        trouble = "not a local address"
        advice = "Name the address to listen on with --host or KVSTORE_BIND_HOST; the one others use stays as it is."
    else:
        trouble = str(error)
        advice = "Name the address to listen on with --host or KVSTORE_BIND_HOST."
    return AddressError(f"cannot listen on {endpoint}: {trouble}. {advice}", address=endpoint)
