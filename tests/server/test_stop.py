"""Signals that end a server."""

from __future__ import annotations

import os
import signal
from typing import cast

import pytest

from kvstore.server.stop import signals
from kvstore.transport import Transport


class Woken:
    count = 0

    def wake(self) -> None:
        self.count += 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_wakes_the_loop(number: signal.Signals) -> None:
    transport = Woken()
    before = signal.getsignal(number)
    with signals(cast(Transport, transport)) as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.is_set() and stop.signal == number and transport.count == 1
    assert signal.getsignal(number) == before
