"""Output of many processes: whole prefixed lines, bounded, and a writer that cannot be blocked for ever."""

from __future__ import annotations

import os
import random
import threading

import pytest

from kvstore.messages import Role
from kvstore.server.output import LONGEST, REDRAW, Lines, Sink, prefix


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"a\nb\n"], b"> a\n> b\n"),
        ([b"a", b"b", b"\n"], b"> ab\n"),
        ([b"a\n\nb\n"], b"> a\n> \n> b\n"),
        ([b"last"], b"> last\n"),
        ([], b""),
        ([b"\xff\x00\xfe\n"], b"> \xff\x00\xfe\n"),
        ([b"dos\r\n"], b"> dos\n"),
        ([b"dos\r", b"\n"], b"> dos\n"),
        ([b"\xe2\x82", b"\xac\n"], b"> \xe2\x82\xac\n"),
    ],
)
def test_lines(pieces: list[bytes], shown: bytes) -> None:
    lines = Lines(b"> ")
    assert b"".join([lines.feed(piece, 0.0) for piece in pieces]) + lines.flush() == shown
    assert lines.flush() == b""


def test_lines_do_not_depend_on_how_the_bytes_arrive() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)  # noqa: T201
    chance = random.Random(seed)
    text = bytes(chance.choice(b"ab\n") for _ in range(2000))
    whole, cut = Lines(b"> "), Lines(b"> ")
    expected = whole.feed(text, 0.0) + whole.flush()
    found, position = b"", 0
    while position < len(text):
        size = chance.randrange(1, 20)
        found += cut.feed(text[position : position + size], 0.0)
        position += size
    assert found + cut.flush() == expected


@pytest.mark.parametrize("newline", [b"\n", b""])
def test_huge_line_is_shown_in_pieces(newline: bytes) -> None:
    lines = Lines(b"> ")
    shown, held = b"", 0
    for _ in range(40):
        shown += lines.feed(b"x" * 10_000, 0.0)
        held = max(held, len(lines._rest))
    shown += lines.feed(newline, 0.0) + lines.flush()
    pieces = shown.split(b"\n")[:-1]
    assert held <= LONGEST
    assert all(piece.startswith(b"> ") and len(piece) <= LONGEST + 2 for piece in pieces)
    assert b"".join(piece[2:] for piece in pieces) == b"x" * 400_000


def test_huge_line_in_one_piece() -> None:
    lines = Lines(b"> ")
    pieces = lines.feed(b"y" * (2 * LONGEST + 5) + b"\n", 0.0).split(b"\n")[:-1]
    assert [len(piece) - 2 for piece in pieces] == [LONGEST, LONGEST, 5]


def test_progress_bar_shows_now_and_then() -> None:
    lines = Lines(b"> ")
    assert lines.feed(b"\r10%", 0.0) == b""
    assert lines.feed(b"\r20%", 0.1) == b"> 10%\n"
    assert lines.feed(b"\r30%\r40%", 0.2) == b""
    assert lines.feed(b"\r50%", 0.1 + REDRAW) == b"> 40%\n"
    assert lines.feed(b"\r100%\n", 0.2 + REDRAW) == b"> 100%\n"


def test_prefix() -> None:
    assert prefix(Role.WORKER, 3, colour=False) == b"worker 3 | "
    assert prefix(Role.SCHEDULER, 0, colour=False) == b"scheduler | "
    coloured = {prefix(role, rank, colour=True) for role in (Role.WORKER, Role.SERVER) for rank in range(4)}
    assert len({text.partition(b"m")[0] for text in coloured}) == 8, "two processes share a colour"
    assert all(text.endswith(b"\x1b[0m") for text in coloured)


def test_sink_gives_up_when_interrupted() -> None:
    reading, writing = os.pipe()
    sink = Sink(writing)
    sink.interrupted = lambda: True
    try:
        sink.write(b"x" * (1 << 22))  # no reader: more than a pipe takes
        assert sink.broken
    finally:
        os.close(reading)
        os.close(writing)


def test_sink_waits_for_a_slow_reader() -> None:
    reading, writing = os.pipe()
    sink, data = Sink(writing), os.urandom(1 << 20)

    def write() -> None:
        sink.write(data)
        os.close(writing)

    thread = threading.Thread(target=write)
    thread.start()
    with os.fdopen(reading, "rb") as reader:
        assert reader.read() == data
    thread.join()
    assert not sink.broken


def test_sink_without_reader_is_broken() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    sink = Sink(writing)
    sink.write(b"x")
    os.close(writing)
    assert sink.broken
    sink.write(b"y")  # the descriptor is closed: nothing may be written any more


def test_colour_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, other = os.openpty()
    try:
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert Sink(other).colour
        monkeypatch.setenv("NO_COLOR", "1")
        assert not Sink(other).colour
    finally:
        os.close(terminal)
        os.close(other)
