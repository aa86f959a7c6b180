"""Operations end once, and what they borrowed is theirs by then."""

from __future__ import annotations

import threading

import numpy as np

from kvstore.errors import KVStoreError, ServerError
from kvstore.lane import PushPart
from kvstore.machine import SCHEDULER
from kvstore.messages import Beat, ChunkEntry, PushEntry
from kvstore.operation import Operation, Pull, Push, Request, abandon, part_address


def test_it_ends_once_whoever_ends_it() -> None:
    ended: list[KVStoreError | None] = []
    operation = Operation("push", 10.0, 2, on_done=lambda done: ended.append(done.error))
    operation.part_done()
    assert not operation.done
    threads = [threading.Thread(target=operation.fail, args=(ServerError(str(number)),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    operation.part_done()
    assert len(ended) == 1 and ended[0] is operation.error is not None


def test_it_ends_well_with_its_last_part() -> None:
    operation = Operation("pull", 10.0, 2)
    operation.part_done()
    operation.part_done()
    operation.fail(ServerError("late"))
    assert operation.done and operation.error is None


def test_borrowed_memory_is_copied_before_the_end_is_told() -> None:
    memory = bytearray(b"abcd")
    operation = Operation("push", 10.0, 1, on_done=lambda done: memory.__setitem__(slice(None), b"xxxx"))
    part = PushPart(operation, PushEntry("w", 0, 1, "none"), memoryview(memory), 0, 0)
    operation.borrowed[part] = None
    operation.fail(ServerError("refused"))
    assert bytes(part.frame) == b"abcd" and bytes(memory) == b"xxxx"


def test_abandoned_pushes_give_their_room_back() -> None:
    freed: list[int] = []
    operation = Operation("push", 10.0, 2, on_acknowledged=freed.append)
    pull = Pull(0, ChunkEntry("w", 0, 1, 1), np.zeros(4, np.uint8))
    abandon(operation, [Push(0, PushEntry("w", 0, 1, "none"), b"12345"), pull])
    assert freed == [5]


def test_addresses_of_parts() -> None:
    assert part_address(Push(2, PushEntry("w", 0, 1, "none"), b"")) == "server-2"
    assert part_address(Request(SCHEDULER, lambda number, left: Beat())) == SCHEDULER
