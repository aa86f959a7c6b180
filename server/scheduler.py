"""The scheduler's process: `Membership` behind a socket, until the job is over or a signal ends it."""

from __future__ import annotations

import logging
import secrets
import signal
from collections.abc import Callable

from kvstore.addresses import bind_endpoints, join_tcp, split_tcp
from kvstore.config import Config
from kvstore.loop import Loop
from kvstore.server.membership import Membership
from kvstore.server.stop import STOPPED, signals
from kvstore.transport import Transport
from kvstore.wire import Wire
from kvstore.zmq_transport import ZmqTransport

FLUSH = 2.0
"""Seconds for the last messages to leave at the end."""

_log = logging.getLogger(__name__)


def run_scheduler(config: Config, *, ready: Callable[[str], None] | None = None) -> int:
    """Serve one job; blocks until it is over. Belongs to the main thread, whose SIGTERM and SIGINT end it.

    Args:
        config: `role` is scheduler; `root_port` 0 picks a free port; without `job`, a random id is drawn.
        ready: called once with the real endpoint, 'tcp://HOST:PORT', when processes may connect.

    Returns:
        0 when the job is over, 128 + n when signal n ended it before.

    Raises:
        AddressError: the address cannot be listened on.
    """
    job = config.job or secrets.token_hex(8)
    machine = Membership(config, job)
    transport = ZmqTransport(config)
    try:
        with signals(transport) as stop:
            endpoint = _bind(transport, config)
            _log.info("scheduler of job %s listens at %s", job, endpoint)
            if ready is not None:
                ready(endpoint)
            wire = Wire(job=job, limits=config.limits, checksum=config.checksum)
            loop = Loop(machine, transport, wire, tick_every=min(0.1, config.heartbeat / 4))
            loop.run(stop)
            if machine.finished:
                return 0
            loop.perform(machine.abandon(f"it was ended by {signal.Signals(stop.signal).name}"))
            return STOPPED + stop.signal
    finally:
        transport.close(flush=FLUSH)


def _bind(transport: Transport, config: Config) -> str:
    """Listen on every endpoint, all with the port of the first; return the first."""
    first, *others = bind_endpoints(config)
    endpoint = transport.bind(first)
    for other in others:
        transport.bind(join_tcp(split_tcp(other)[0], split_tcp(endpoint)[1]))
    return endpoint
