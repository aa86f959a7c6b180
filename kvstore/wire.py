"""Messages and raw payload frames <-> lists of byte frames, within limits that are checked before anything is built.

    frame 0      msgpack map {"v": protocol version, "job": job id, "body": {"type": ..., fields}, "crc": [...]?}
    frame 1..n   payloads: raw little-endian tensor bytes or codec bytes, in the order of the message's entries

Nothing read from the wire is ever executed, imported or unpickled: the header can only become one of the types of
`kvstore.messages`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import msgspec

from kvstore.errors import ProtocolError
from kvstore.messages import PROTOCOL_VERSION, WITHOUT_JOB, Frame, Message


class _Envelope(msgspec.Struct, omit_defaults=True):
    v: int
    job: str
    body: Message
    crc: list[int] | None = None


_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Limits:
    """Largest sizes this process accepts. Bytes, except where a name says otherwise."""

    header: int = 4 << 20
    text: int = 1 << 20
    items: int = 1 << 16
    frames: int = 4097
    frame: int = 4 << 20


@dataclass(frozen=True)
class Wire:
    """Encoder and decoder of one process. `job` '' accepts every job (before `Start`, and in tools)."""

    job: str = ""
    limits: Limits = Limits()
    checksum: bool = False

    def encode(self, message: Message, frames: Sequence[Frame] = ()) -> list[Frame]:
        """Return [header, *frames]; the frames are not copied.

        Raises:
            ProtocolError: the header is larger than a receiver accepts.
        """
        crc = [zlib.crc32(frame) for frame in frames] if self.checksum and frames else None
        header = _ENCODER.encode(_Envelope(PROTOCOL_VERSION, self.job, message, crc))
        if len(header) > self.limits.header:
            raise ProtocolError(f"{type(message).__name__} needs {len(header)} bytes, allowed are {self.limits.header}")
        return [header, *frames]

    def decode(self, frames: Sequence[Frame]) -> tuple[Message, Sequence[Frame]]:
        """Return (message, payload frames).

        Raises:
            ProtocolError: a limit, the version, the job id, a checksum or the shape of the message is wrong.
        """
        self._check_sizes(frames)
        envelope = self._unpack(frames[0])
        version, job = envelope.get("v"), envelope.get("job")
        if version != PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {version!r} is not {PROTOCOL_VERSION}: run one release everywhere")
        try:
            message = msgspec.convert(envelope, _Envelope).body
        except msgspec.ValidationError as error:
            raise ProtocolError(f"not a message of this protocol: {error}") from error
        if self.job and job != self.job and not isinstance(message, WITHOUT_JOB):
            raise ProtocolError(f"message of job {job!r}, this is job {self.job!r}: left over from an older launch?")
        payload = frames[1:]
        self._check_crc(envelope.get("crc"), payload)
        return message, payload

    def _check_sizes(self, frames: Sequence[Frame]) -> None:
        if not 1 <= len(frames) <= self.limits.frames:
            raise ProtocolError(f"{len(frames)} frames in a message, allowed are 1 to {self.limits.frames}")
        if frame_bytes(frames[0]) > self.limits.header:
            raise ProtocolError(f"header of {frame_bytes(frames[0])} bytes, allowed are {self.limits.header}")
        largest = max((frame_bytes(frame) for frame in frames[1:]), default=0)
        if largest > self.limits.frame:
            raise ProtocolError(f"payload frame of {largest} bytes, allowed are {self.limits.frame}")

    def _unpack(self, header: Frame) -> dict[str, Any]:
        limits = self.limits
        try:
            envelope = msgpack.unpackb(
                header,
                strict_map_key=True,
                max_str_len=limits.text,
                max_bin_len=0,
                max_ext_len=0,
                max_array_len=limits.items,
                max_map_len=limits.items,
            )
        except Exception as error:  # msgpack raises ValueError, its own classes and UnicodeDecodeError
            raise ProtocolError(f"header is not msgpack within the limits: {type(error).__name__}: {error}") from error
        if not isinstance(envelope, dict):
            raise ProtocolError(f"header is a {type(envelope).__name__}, not a map")
        return envelope

    @staticmethod
    def _check_crc(expected: object, payload: Sequence[Frame]) -> None:
        if expected is None:
            return
        if expected != [zlib.crc32(frame) for frame in payload]:
            raise ProtocolError("checksum of a payload differs: the bytes were damaged on the way")


def frame_bytes(frame: Frame) -> int:
    """Size of a payload frame in bytes."""
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)
