"""From arrived frames to a machine's actions: decode, hand over, and answer what went wrong with `Failed`.

Shared by the real loop and the simulator, so that both answer bad messages alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvstore.errors import KVStoreError, ProtocolError, to_wire
from kvstore.machine import Action, Machine, Send
from kvstore.messages import Failed, Failure, Frame
from kvstore.wire import Wire

TEXT_LIMIT = 4000
"""Characters of an error's text that travel: it may quote what was refused."""

Report: TypeAlias = Callable[[str, Exception], object]
"""Called as report(message's type, error), before a refusal is answered; the type is '' if it could not be read."""


def dispatch(
    machine: Machine,
    wire: Wire,
    sender: str,
    frames: Sequence[Frame],
    now: float,
    *,
    chosen: bool = False,
    report: Report | None = None,
) -> list[Action]:
    """Give one arrived message to `machine`; return what it wants done, or the answer to a message it refused.

    A message that cannot be read is answered, unless its sender is one we connected to (`chosen`): two processes
    that cannot read each other would answer each other's answers for ever. For the same reason a `Failed` is never
    answered.

    Args:
        now: seconds, monotonic.
        report: told of every refusal. With it, faults of the machine itself (exceptions that are not KVStoreErrors)
            are reported and answered too; without it they pass through.
    """
    try:
        message, payload = wire.decode(frames)
    except ProtocolError as error:
        if report is not None:
            report("", error)
        return [] if chosen else [_answer(sender, error, None)]
    try:
        return list(machine.receive(sender, message, payload, now))
    except Exception as error:
        if report is not None:
            report(type(message).__name__, error)
        elif not isinstance(error, KVStoreError):
            raise
        return [] if isinstance(message, Failed) else [_answer(sender, error, getattr(message, "sequence", None))]


def _answer(sender: str, error: Exception, sequence: int | None) -> Send:
    name, text, facts = to_wire(error)
    return Send(sender, Failed(failure=Failure(name, text[:TEXT_LIMIT], facts), sequence=sequence))
