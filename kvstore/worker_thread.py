"""The one thread of a worker that owns its sockets: runs the worker's machine, takes requests from any thread."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from kvstore.addresses import scheduler_endpoint
from kvstore.config import Config
from kvstore.errors import ClosedError, JoinError, KVStoreError, OperationTimeoutError
from kvstore.loop import Loop
from kvstore.machine import Action, server_address
from kvstore.member import Member, MemberState
from kvstore.messages import Role
from kvstore.operation import Operation, Part, abandon
from kvstore.wire import Wire
from kvstore.worker import WorkerMachine
from kvstore.zmq_transport import ZmqTransport

log = logging.getLogger("kvstore")
SAY_EVERY = 3.0
"""Seconds between two lines that say for whom `create` waits."""
TICK = 0.1
FLUSH = 2.0

Task = Callable[[float], Iterable[Action]]
Failing = Callable[[KVStoreError], None]
"""What to do with a task that cannot be carried out."""


class WorkerThread:
    """Start it, submit operations, close it. All methods may be called from any thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tasks: deque[tuple[Task, Failing]] = deque()
        self._handover = threading.Lock()
        self._ended = False
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        member = Member(
            config, Role.WORKER, wanted_rank=config.worker_id, pid=os.getpid(), host=socket.gethostname(),
            scheduler=scheduler_endpoint(config),
        )  # fmt: skip
        self.machine = WorkerMachine(config, member)
        self._transport: ZmqTransport | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-worker", daemon=True)

    def start(self) -> None:
        """Join the job; return when it is complete. Says every few seconds who is missing.

        Raises:
            JoinError, MismatchError, AddressError, PeerLostError: the job did not come together, or refused us.
        """
        try:
            self._thread.start()
            deadline = time.monotonic() + self._config.timeout + 2.0
            while not self._changed.wait(SAY_EVERY):
                log.warning("waiting to join the job: %s", self.machine.member.waiting_text)
                if time.monotonic() > deadline:  # the machine ends by itself before that
                    raise JoinError(f"could not join the job: {self.machine.member.waiting_text}")
            error = self._failure or self.machine.error
            if error is not None:
                raise error
        except BaseException:  # Ctrl-C too: nothing of a store that was never made stays in the job
            self.close(leave=False)
            raise

    def submit(self, operation: Operation, parts: Iterable[Part]) -> None:
        """Hand parts of an operation over; errors end the operation."""
        handed = list(parts)

        def failing(error: KVStoreError) -> None:
            operation.fail(error)
            abandon(operation, handed)

        if not self._post(lambda now: self.machine.submit(operation, handed, now), failing):
            failing(self._why_ended())

    def close(self, leave: bool = True) -> None:
        """Leave the job (`leave=False`: tell that this process ends out of order) and end the thread. Never hangs."""
        if self._stop.is_set() or not self._thread.is_alive():
            self._stop.set()
            return
        if leave and self.machine.session is not None and self.machine.error is None:
            self._post(self.machine.leave, _ignore)
            self._thread.join(FLUSH)
        elif not leave:
            self._post(lambda now: self.machine.abort(), _ignore)
        self._stop.set()
        self._wake()
        self._thread.join(FLUSH + 1.0)

    def _post(self, task: Task, failing: Failing) -> bool:
        """Hand a task over; False if the thread takes none any more. `failing` is called if it fails there."""
        with self._handover:
            if self._ended or self._stop.is_set() or not self._thread.is_alive():
                return False
            self._tasks.append((task, failing))
        self._wake()
        return True

    def _wake(self) -> None:
        if self._transport is not None:
            self._transport.wake()

    def _run(self) -> None:
        try:
            self._transport = ZmqTransport(self._config)
            self._serve(self._transport)
        except BaseException as error:  # handed to whoever waits: a thread's exceptions would be lost
            self._failure = error
            log.debug("worker thread ends", exc_info=True)
        finally:
            self._end()

    def _serve(self, transport: ZmqTransport) -> None:
        config = self._config
        wire = Wire(config.job, config.limits, config.checksum)
        loop = Loop(self.machine, transport, wire, tick_every=min(TICK, config.heartbeat / 4))
        loop.perform(self.machine.start(time.monotonic()))
        while not (self._stop.is_set() or self.machine.finished or self._refused()):
            loop.step(TICK)
            if self.machine.session is not None or self.machine.error is not None:
                self._changed.set()
            self._work(loop)
        self._work(loop)

    def _work(self, loop: Loop) -> None:
        while self._tasks:
            task, failing = self._tasks.popleft()
            try:
                loop.perform(task(time.monotonic()))
            except Exception as error:  # what cannot be encoded, for example: the user's mistake, and only this call's
                failing(_as_error(error))

    def _end(self) -> None:
        """Nothing stays unanswered: whatever is under way or was handed over ends."""
        with self._handover:
            self._ended = True
        error = self._why_ended()
        if self.machine.session is not None:
            self.machine.session.fail_all(error)
        while self._tasks:
            self._tasks.popleft()[1](error)
        if self._transport is not None:
            # Pushes are acknowledged by now. ZeroMQ may abort the process while it waits on a connection that goes on
            # receiving, and closes it: only the scheduler's, which carries nothing large, gets the time to flush.
            for server in range(self._config.num_servers):
                self._transport.disconnect(server_address(server))
            self._transport.close(flush=FLUSH if self.machine.error is None else 0.0)  # else nobody listens
        self._changed.set()

    def _why_ended(self) -> KVStoreError:
        if self._failure is not None:
            return _as_error(self._failure)
        return self.machine.error or ClosedError("the store was closed before this was done")

    def _refused(self) -> bool:
        return self.machine.member.state is MemberState.FAILED and self.machine.session is None


def _ignore(error: KVStoreError) -> None:
    pass


def _as_error(error: BaseException) -> KVStoreError:
    if isinstance(error, KVStoreError):
        return error
    return KVStoreError(f"the worker's thread could not do this: {type(error).__name__}: {error}")


class Budget:
    """Bounds the bytes that `push` has copied and the servers have not acknowledged."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._free = threading.Condition()

    def try_take(self, size: int) -> bool:
        """Take room if there is enough; something larger than the limit may go alone."""
        with self._free:
            fits = not self._used or self._used + size <= self._limit
            self._used += size if fits else 0
            return fits

    def add(self, size: int) -> None:
        """Take room, whether there is any or not."""
        with self._free:
            self._used += size

    def wait_for_room(self, deadline: float, size: int = 1) -> None:
        """Wait until there is room for `size` bytes, or nothing is used.

        Raises:
            OperationTimeoutError: `deadline` (monotonic seconds) passed: servers do not take what was pushed.
        """
        with self._free:
            while self._used and self._used + size > self._limit:
                left = deadline - time.monotonic()
                if left <= 0 or not self._free.wait(left):
                    raise OperationTimeoutError(
                        f"push waited in vain for room: {self._used} bytes are not acknowledged by the servers, "
                        f"the limit is {self._limit} (KVSTORE_QUEUE_BYTES)"
                    )

    def give(self, size: int) -> None:
        """These bytes are no longer held."""
        with self._free:
            self._used = max(self._used - size, 0)
            self._free.notify_all()
