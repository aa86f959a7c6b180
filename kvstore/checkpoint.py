"""The file of `save` and `load`: everything a store knows, in one safetensors file that runs no code when read.

Layout: a safetensors file (readable by any tool for that format) whose tensors are named by kind and number, and whose
metadata holds `format`, `version` and `manifest`, a JSON text that says which key each tensor belongs to. The tensor
`digest` holds the BLAKE2b-256 of the whole file, taken with those 32 bytes as zeros: one changed byte anywhere, or a
missing end, is found before anything is used. The digest guards against damage, not against forgery.

Both kinds of stores write the same fields and read each other's files. Where residuals lie differs: a local store keeps
them in its file, the positions of a key's list of arrays one after another; a distributed store keeps each rank's in a
file of its own, PATH.rankN, that repeats the `save` of PATH. A store leaves alone what lies where it does not look.

A file is written beside its final place, flushed to the disk and then renamed, so a crash leaves the old file or the
new one, never half of one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn, TypeAlias

import ml_dtypes
import msgspec
import numpy as np
import safetensors
import safetensors.numpy
from msgspec import Meta
from numpy.typing import NDArray

from kvstore.errors import ArrayError, CheckpointError

Key: TypeAlias = int | str
Array: TypeAlias = NDArray[Any]

FORMAT = "gradkv-checkpoint"
VERSION = 1
DIGEST = "digest"
DIGEST_BYTES = 32
MAX_HEADER = 100_000_000
"""Largest header in bytes that is read, the limit of safetensors itself."""

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}


@dataclass
class Checkpoint:
    """What a file holds. Keys 3 and '3' are different keys, as everywhere."""

    values: dict[Key, Array] = field(default_factory=dict)
    """Value of each key, in the key's own dtype and shape."""
    masters: dict[Key, Array] = field(default_factory=dict)
    """float32 master of a half-precision key, in the key's shape."""
    optimizer: dict[str, Any] | None = None
    """The optimizer's specification, as plain JSON data."""
    optimizer_name: str | None = None
    """Whose state this is, also where the specification is left out; None: no optimizer was set."""
    state: dict[Key, dict[str, Array]] = field(default_factory=dict)
    """Optimizer state of each key: name -> flat array of as many elements as the key has. Empty ones are left out."""
    steps: dict[Key, int] = field(default_factory=dict)
    """Updates made so far, per key."""
    rounds: dict[Key, int] = field(default_factory=dict)
    """Pushes made so far, per key; in a rank's file that rank's. Warm-up rounds of compression are counted by them."""
    save: str = ""
    """Names this save, alike in all its files; see `new_save`."""
    residuals: dict[Key, Array] = field(default_factory=dict)
    """Unsent gradient per key: flat float32; one key's devices one after another."""
    codec: dict[Key, dict[str, Array]] = field(default_factory=dict)
    """What codecs keep of each key, beside the residual: name -> array."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Anything else, as plain JSON data."""


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor belongs: its name in the file, kind, key, and name of the state array."""

    name: str
    kind: str
    key: int | str
    part: str


_Counts: TypeAlias = list[tuple[int | str, Annotated[int, Meta(ge=0)]]]


class _Manifest(msgspec.Struct, frozen=True):
    tensors: list[_Tensor]
    steps: _Counts
    optimizer: dict[str, Any] | None
    extra: dict[str, Any]
    optimizer_name: str | None = None
    rounds: _Counts = []
    save: str = ""


@dataclass(frozen=True)
class Header:
    """What ties files and ranks together: the digest in hex as the file states it, `save` and `rounds`."""

    digest: str
    save: str
    rounds: dict[Key, int]


def new_save() -> str:
    """Return a new value for `Checkpoint.save`."""
    return secrets.token_hex(16)


def write_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write `checkpoint` to `path`, replacing an older file in one step.

    Raises:
        ArrayError: an array has a dtype that cannot be stored, or a size that does not fit its key.
        CheckpointError: the plain data is not plain, or the file cannot be written; an older file is unchanged.
    """
    target = Path(path)
    _check(checkpoint)
    tensors: dict[str, Array] = {DIGEST: np.zeros(DIGEST_BYTES, np.uint8)}
    places: list[_Tensor] = []
    for kind, key, part, array in _walk(checkpoint):
        places.append(_Tensor(f"{kind}/{len(places)}", kind, key, part))
        tensors[places[-1].name] = _storable(array, key)
    metadata = {"format": FORMAT, "version": str(VERSION), "manifest": _manifest_text(target, checkpoint, places)}
    draft = target.with_name(f".gradkv-{secrets.token_hex(8)}.tmp")
    try:
        _write_draft(draft, tensors, metadata)
        draft.replace(target)
        _flush_folder(target.parent)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{target} cannot be written: {error}", path=str(target)) from error
    finally:
        with contextlib.suppress(OSError, ValueError):
            draft.unlink()


def _walk(checkpoint: Checkpoint) -> Iterator[tuple[str, Key, str, Array]]:
    """Yield (kind, key, name of the state array or '', array)."""
    for kind, arrays in (
        ("value", checkpoint.values),
        ("master", checkpoint.masters),
        ("residual", checkpoint.residuals),
    ):
        for key, array in arrays.items():
            yield kind, key, "", array
    for kind, groups in (("state", checkpoint.state), ("codec", checkpoint.codec)):
        for key, parts in groups.items():
            for part, array in parts.items():
                yield kind, key, part, array


def _storable(array: Array, key: Key) -> Array:
    """Return `array` contiguous and little-endian."""
    dtype = array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype
    if dtype not in DTYPES.values():
        raise ArrayError(f"key {key!r}: dtype {array.dtype} cannot be saved", key=key)
    return np.require(array, dtype, ["C"])


def _manifest_text(path: Path, checkpoint: Checkpoint, places: list[_Tensor]) -> str:
    steps, rounds = list(checkpoint.steps.items()), list(checkpoint.rounds.items())
    manifest = _Manifest(
        places, steps, checkpoint.optimizer, checkpoint.extra, checkpoint.optimizer_name, rounds, checkpoint.save
    )
    try:
        # json rather than msgspec writes the text: msgspec would turn NaN into null without a word.
        text = json.dumps(msgspec.to_builtins(manifest), allow_nan=False)
        read = msgspec.json.decode(text, type=_Manifest)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse(path, f"cannot be written: keys must be int or str, other data plain JSON ({error})", error)
    if read != manifest:
        _refuse(path, "cannot be written: `optimizer` or `extra` holds more than plain JSON with text as names")
    return text


def _write_draft(draft: Path, tensors: dict[str, Array], metadata: dict[str, str]) -> None:
    """Write the whole file, digest included, and flush it to the disk."""
    with draft.open("xb") as file:
        mode = os.fstat(file.fileno()).st_mode  # what the umask allows; safetensors would leave 0600
    safetensors.numpy.save_file(tensors, draft, metadata=metadata)
    draft.chmod(mode)
    with draft.open("r+b") as file:
        at = _digest_offset(file, draft.stat().st_size, draft)
        digest = _digest(file, at)
        file.seek(at)
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Make the renaming last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot flush a folder; the file itself is complete
            os.fsync(handle)
    finally:
        os.close(handle)


def _digest(file: BinaryIO, at: int) -> bytes:
    """Return the BLAKE2b-256 of the file with zeros in the digest's place, which starts at byte `at`."""
    file.seek(0)
    digest = hashlib.blake2b(file.read(at) + bytes(DIGEST_BYTES), digest_size=DIGEST_BYTES)
    file.seek(at + DIGEST_BYTES)
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.digest()


def _digest_offset(file: BinaryIO, size: int, path: Path) -> int:
    """Return where the digest's 32 bytes lie. Raises CheckpointError for what is no safetensors file of ours."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, MAX_HEADER):
        _refuse(path, "is no gradkv checkpoint, or its end is missing")
    try:
        header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
        metadata = header["__metadata__"]
        if metadata["format"] != FORMAT:
            raise ValueError(metadata["format"])
        start, end = header[DIGEST]["data_offsets"]
        at = 8 + length + int(start)
        if end - start != DIGEST_BYTES or not 8 + length <= at <= size - DIGEST_BYTES:
            raise ValueError(start)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        _refuse(path, "is no gradkv checkpoint, or is damaged", error)
    if metadata.get("version") != str(VERSION):
        _refuse(path, f"has version {metadata.get('version')}, this program reads version {VERSION}")
    return at


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a file that `write_checkpoint` wrote; the arrays are new and writable.

    Raises:
        CheckpointError: the file is missing, damaged, foreign or inconsistent; `error.path` names it.
    """
    source = Path(path)
    try:
        data = source.read_bytes()
    except (OSError, ValueError) as error:
        _refuse(source, f"cannot be read: {error}", error)
    file = io.BytesIO(data)
    at = _digest_offset(file, len(data), source)
    if data[at : at + DIGEST_BYTES] != _digest(file, at):
        _refuse(source, "is damaged: its digest does not match its content")
    try:
        return _decode(source, data)
    except (safetensors.SafetensorError, ValueError, TypeError, RecursionError) as error:
        _refuse(source, f"is no valid gradkv checkpoint: {error}", error)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read a file's header, without its arrays. The digest is not verified: compare it with that of a file that was.

    Raises:
        CheckpointError: the file is missing or foreign; `error.path` names it.
    """
    source = Path(path)
    try:
        with source.open("rb") as file:
            at = _digest_offset(file, os.fstat(file.fileno()).st_size, source)
            file.seek(at)
            digest = file.read(DIGEST_BYTES).hex()
            file.seek(0)
            manifest = _manifest_in(file)
    except OSError as error:
        _refuse(source, f"cannot be read: {error}", error)
    except (ValueError, TypeError, RecursionError) as error:
        _refuse(source, f"is no valid gradkv checkpoint: {error}", error)
    return Header(digest, manifest.save, dict(manifest.rounds))


def _manifest_in(file: BinaryIO) -> _Manifest:
    length = int.from_bytes(file.read(8), "little")
    header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
    return msgspec.json.decode(header.get("__metadata__", {}).get("manifest", ""), type=_Manifest)


def _decode(path: Path, data: bytes) -> Checkpoint:
    """Turn the verified bytes into a Checkpoint; a forged file must still fail cleanly."""
    manifest = _manifest_in(io.BytesIO(data))
    arrays = {}
    for name, tensor in safetensors.deserialize(data):  # type: ignore[no-untyped-call]
        if tensor["dtype"] not in DTYPES:
            _refuse(path, f"holds a tensor of type {tensor['dtype']}, which this program does not read")
        arrays[name] = np.ndarray(tuple(tensor["shape"]), DTYPES[tensor["dtype"]], buffer=tensor["data"])
    checkpoint = Checkpoint(
        optimizer=manifest.optimizer, optimizer_name=manifest.optimizer_name, steps=dict(manifest.steps),
        rounds=dict(manifest.rounds), save=manifest.save, extra=manifest.extra,
    )  # fmt: skip
    for place in manifest.tensors:
        if place.name not in arrays:
            _refuse(path, f"lacks the tensor {place.name!r}")
        _place(path, checkpoint, place, arrays.pop(place.name))
    if set(arrays) != {DIGEST}:
        _refuse(path, f"holds tensors that belong to no key: {', '.join(sorted(arrays))[:200]}")
    _check(checkpoint)
    return checkpoint


def _place(path: Path, checkpoint: Checkpoint, place: _Tensor, array: Array) -> None:
    match place.kind:
        case "value":
            checkpoint.values[place.key] = array
        case "master":
            checkpoint.masters[place.key] = array
        case "residual":
            checkpoint.residuals[place.key] = array
        case "state":
            checkpoint.state.setdefault(place.key, {})[place.part] = array
        case "codec":
            checkpoint.codec.setdefault(place.key, {})[place.part] = array
        case _:
            _refuse(path, f"holds a tensor of unknown kind {place.kind!r}")


def _check(checkpoint: Checkpoint) -> None:
    """Raise ArrayError unless masters, state and residuals fit their keys' values (where the values are there)."""
    for kind, key, part, array in _walk(checkpoint):
        value = checkpoint.values.get(key)
        if kind in ("master", "residual") and array.dtype != np.float32:
            raise ArrayError(f"key {key!r}: the {kind} has dtype {array.dtype}, it must be float32", key=key)
        if kind in ("state", "residual") and array.ndim != 1:
            raise ArrayError(f"key {key!r}: the {kind} {part} has {array.ndim} dimensions, it must be flat", key=key)
        if value is None or kind in ("value", "codec"):
            continue
        fits = {
            "master": array.shape == value.shape,
            "state": array.size == value.size,
            "residual": array.size % max(value.size, 1) == 0 and (value.size > 0 or array.size == 0),
        }[kind]
        if not fits:
            raise ArrayError(
                f"key {key!r}: the {kind} {part} of shape {array.shape} does not fit {value.shape}", key=key
            )


def _refuse(path: Path, reason: str, cause: BaseException | None = None) -> NoReturn:
    raise CheckpointError(f"{path} {reason}", path=str(path)) from cause
