"""Bytes from anywhere become a message of the protocol or a ProtocolError, never anything else."""

import pickle
import struct
import zlib
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ProtocolError
from kvstore.messages import (
    PROTOCOL_VERSION,
    WITHOUT_JOB,
    Ack,
    AskStatus,
    Beat,
    Failed,
    Failure,
    Frame,
    Push,
    PushEntry,
    Start,
)
from kvstore.wire import Limits, Wire

WIRE = Wire("job")
PUSH = Push(sequence=7, rank=1, entries=[PushEntry("w", 0, 3, "2bit", {"n": 64, "t": 0.5})])


def header(body: object, **fields: Any) -> bytes:
    packed: bytes = msgpack.packb({"v": PROTOCOL_VERSION, "job": "job", "body": body, **fields})
    return packed


def test_header_is_the_documented_msgpack_map_and_frames_are_not_copied() -> None:
    payload = bytearray(b"abcd")
    frames = WIRE.encode(PUSH, [payload])
    assert msgpack.unpackb(frames[0]) == {
        "v": PROTOCOL_VERSION,
        "job": "job",
        "body": {
            "type": "push",
            "sequence": 7,
            "rank": 1,
            "entries": [["w", 0, 3, "2bit", {"n": 64, "t": 0.5}, False]],
        },
    }
    assert frames[1] is payload
    message, received = WIRE.decode(frames)
    assert message == PUSH and received[0] is payload


def test_header_may_come_as_a_view() -> None:
    frames = WIRE.encode(PUSH)
    assert WIRE.decode([memoryview(bytes(frames[0]))])[0] == PUSH


def test_checksum_finds_damage_and_is_checked_by_everybody() -> None:
    payload: list[Frame] = [b"one", memoryview(b"two")]
    frames = replace(WIRE, checksum=True).encode(PUSH, payload)
    assert msgpack.unpackb(frames[0])["crc"] == [zlib.crc32(b"one"), zlib.crc32(b"two")]
    assert WIRE.decode(frames)[0] == PUSH
    for damaged in ([frames[0], b"onf", b"two"], [frames[0], b"two", b"one"], frames[:2]):
        with pytest.raises(ProtocolError, match="checksum"):
            WIRE.decode(damaged)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, None, "1", [1]])
def test_other_version_is_refused_by_name_before_the_body_is_read(version: object) -> None:
    with pytest.raises(ProtocolError, match=r"protocol version .* run one release everywhere"):
        WIRE.decode([header({"type": "from the future"}, v=version)])


def test_other_job_is_refused_but_for_messages_that_need_none() -> None:
    old = Wire("yesterday")
    with pytest.raises(ProtocolError, match=r"'yesterday'.*'job'.*older launch"):
        WIRE.decode(old.encode(Beat()))
    for message in (
        AskStatus(sequence=1),
        Failed(failure=Failure("JoinError", "x")),
        Start(job="j", rank=0, servers=[]),
    ):
        assert isinstance(message, WITHOUT_JOB)
        assert WIRE.decode(old.encode(message))[0] == message
    assert Wire().decode(old.encode(Beat()))[0] == Beat()


def test_each_limit_names_itself() -> None:
    tight = Wire("job", Limits(header=100, text=20, items=4, frames=3, frame=10))
    cases: list[tuple[list[Frame], str]] = [
        ([], "0 frames"),
        ([header({"type": "beat"}), b"", b"", b""], "4 frames"),
        ([b"x" * 101], "header of 101 bytes"),
        ([header({"type": "beat"}), b"x" * 11], "payload frame of 11 bytes"),
        ([header({"type": "beat"}), memoryview(bytearray(88)).cast("q")], "payload frame of 88 bytes"),
        ([header({"type": "ack", "sequences": [1] * 5})], "within the limits"),
        ([header({"type": "x" * 21})], "within the limits"),
        ([header({"type": "beat"}, a=1, b=2)], "within the limits"),
    ]
    for frames, text in cases:
        with pytest.raises(ProtocolError, match=text):
            tight.decode(frames)
    assert tight.decode([header({"type": "beat"}), b"x" * 10, b""])[0] == Beat()


@pytest.mark.parametrize(
    "start",
    [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9", b"\x93\xdd"],
    ids=["array", "map", "text", "binary", "extension", "nested array"],
)
def test_a_huge_declared_length_is_refused_before_anything_is_built(start: bytes) -> None:
    with pytest.raises(ProtocolError):
        WIRE.decode([start + struct.pack(">I", 2**32 - 1)])


@pytest.mark.parametrize(
    "raw",
    [
        pickle.dumps(PUSH.sequence),
        b"\x91" * 100_000 + b"\xc0",
        b"\x81\xc0\xc0",
        b"\x81\x91\x01\x01",
        b"\xa2\xff\xfe",
        msgpack.packb([1]),
        msgpack.packb({"v": PROTOCOL_VERSION}),
        header(None),
        header({"type": ["push"]}),
        header({"type": "push", "sequence": 1, "rank": 0, "entries": [[{}, 0, 0, "x"]]}),
        header({"type": "beat"}, job=5),
        header({"type": "beat"}, crc="x"),
        header({"type": "beat"}, crc=[2**70 % 2**64]),
        header({"type": "beat"}) + b"\x00",
        msgpack.packb({"v": PROTOCOL_VERSION, "job": "job", "body": {"type": "beat"}}, use_single_float=True)[:-1],
        b"",
    ],
    ids=range(16),
)
def test_malformed_headers(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        WIRE.decode([raw])


@settings(max_examples=400, deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=4))
def test_random_bytes_give_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        WIRE.decode(frames)


_plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
_trees = st.recursive(
    _plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(["push", "pull", "values", "register", "failed", "status", "state"]), _trees, _trees)
def test_wellformed_msgpack_of_any_shape_gives_a_message_or_a_protocol_error(tag: str, tree: Any, crc: Any) -> None:
    body = {**tree, "type": tag} if isinstance(tree, dict) else tree
    with pytest.raises(ProtocolError):
        WIRE.decode([header(body, crc=crc)])


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damaged_messages_give_a_message_or_a_protocol_error(data: st.DataObject) -> None:
    raw = bytearray(header({"type": "push", "sequence": 1, "rank": 0, "entries": [["w", 0, 1, "2bit", {"n": 4}]]}))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for damaged in (bytes(raw), bytes(raw[:cut])):
        try:
            message, _ = WIRE.decode([damaged])
        except ProtocolError:
            continue
        assert isinstance(message, (Push, Ack, *WITHOUT_JOB))
