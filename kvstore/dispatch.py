"""From arrived frames to a machine's actions: decode, hand over, and answer what went wrong with `Failed`.

Shared by the real loop and the simulator, so that both answer bad messages alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgpack

from kvstore.errors import KVStoreError, ProtocolError, to_wire
from kvstore.machine import Action, Machine, Send
from kvstore.messages import Failed, Failure, Frame
from kvstore.wire import Wire


def dispatch(machine: Machine, wire: Wire, sender: str, frames: Sequence[Frame], now: float) -> list[Action]:
    """Give one arrived message to `machine`; return what it wants done, or the answer to a message it refused.

    A message that cannot be read, and a request that raises KVStoreError, become `Failed` to the sender. A `Failed`
    is never answered: two processes that cannot read each other would answer each other for ever. Other exceptions
    are faults of the machine itself and pass through.

    Args:
        now: seconds, monotonic.
    """
    try:
        message, payload = wire.decode(frames)
    except ProtocolError as error:
        return [] if _is_failed(frames) else [_answer(sender, error, None)]
    try:
        return list(machine.receive(sender, message, payload, now))
    except KVStoreError as error:
        return [] if isinstance(message, Failed) else [_answer(sender, error, getattr(message, "sequence", None))]


def _answer(sender: str, error: KVStoreError, sequence: int | None) -> Send:
    return Send(sender, Failed(failure=Failure(*to_wire(error)), sequence=sequence))


def _is_failed(frames: Sequence[Frame]) -> bool:
    """Is this unreadable message a `Failed`, as far as can be told? Another version's header still says so."""
    try:
        envelope = msgpack.unpackb(frames[0], max_array_len=64, max_map_len=64, max_ext_len=0, max_bin_len=0)
        return envelope["body"]["type"] == "failed"  # type: ignore[no-any-return]
    except Exception:  # not msgpack, or not a map of maps: msgpack raises ValueError, its own classes and others
        return False
