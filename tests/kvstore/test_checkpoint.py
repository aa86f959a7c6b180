"""The checkpoint file: everything comes back, damage is found, nothing runs, old files survive failures."""

import os
import pickle
import random
import stat
from dataclasses import fields
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import safetensors.numpy

from kvstore import checkpoint as module
from kvstore.checkpoint import (
    DIGEST,
    DIGEST_BYTES,
    DTYPES,
    Array,
    Checkpoint,
    Key,
    new_save,
    read_checkpoint,
    read_header,
    write_checkpoint,
)
from kvstore.errors import ArrayError, CheckpointError

KEYS: list[Key] = [
    "3",
    3,
    -(2**63),
    2**63 - 1,
    "",
    "a/b",
    "ключ 鍵 🔑",
    'q"\\\n\0',
    "k" * 1024,
    "__metadata__",
    "digest",
]


def small() -> Checkpoint:
    """Return a checkpoint with something in every field."""
    return Checkpoint(
        values={"w": np.arange(6, dtype="f2").reshape(2, 3), 3: np.array(7, "i8")},
        masters={"w": np.arange(6, dtype="f4").reshape(2, 3) / 3},
        optimizer={"name": "adam", "params": {"learning_rate": 0.1}, "schedule": None},
        optimizer_name="adam",
        state={"w": {"mean": np.ones(6, "f4"), "var": np.zeros(6, "f4")}},
        steps={"w": 4, 3: 0},
        rounds={"w": 5, 3: 1},
        save="of-this-time",
        residuals={"w": np.full(12, 0.25, "f4")},
        extra={"rounds": 4, "names": ["a", "ü"], "ratio": 0.1},
    )


def same(one: Any, other: Any) -> bool:
    """Tell whether two fields are equal to the last bit, types of keys included."""
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        types = [(type(key), key) for key in one] == [(type(key), key) for key in other]
        return types and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def assert_round_trip(path: Path, checkpoint: Checkpoint) -> Checkpoint:
    write_checkpoint(path, checkpoint)
    read = read_checkpoint(path)
    for part in fields(Checkpoint):
        assert same(getattr(checkpoint, part.name), getattr(read, part.name)), part.name
    return read


def test_everything_comes_back(tmp_path: Path) -> None:
    read = assert_round_trip(tmp_path / "all.ckpt", small())
    read.values["w"][0, 0] = 9  # writable


def test_an_empty_checkpoint_comes_back(tmp_path: Path) -> None:
    assert_round_trip(tmp_path / "empty.ckpt", Checkpoint())


def test_optimizer_state_comes_back_without_values(tmp_path: Path) -> None:
    full = small()
    assert_round_trip(tmp_path / "s.ckpt", Checkpoint(optimizer=full.optimizer, state=full.state, steps=full.steps))


def test_r04_every_kind_of_key_comes_back(tmp_path: Path) -> None:
    values: dict[Key, Array] = {key: np.full(2, i, "f4") for i, key in enumerate(KEYS)}
    state = {key: {"/m\0": array} for key, array in values.items()}
    steps = {key: i for i, key in enumerate(KEYS)}
    assert_round_trip(tmp_path / "keys.ckpt", Checkpoint(values=values, state=state, steps=steps, residuals=values))


@pytest.mark.parametrize("dtype", [*DTYPES.values(), np.dtype(">f4")], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 5)], ids=str)
def test_r11_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(11).integers(0, 100, shape).astype(dtype)
    write_checkpoint(tmp_path / "c", Checkpoint(values={"w": array}))
    read = read_checkpoint(tmp_path / "c").values["w"]
    assert same(read, array.astype(dtype.newbyteorder("=")))


def test_bits_are_kept(tmp_path: Path) -> None:
    patterns = np.arange(2**16, dtype="u2")
    assert_round_trip(tmp_path / "c", Checkpoint(values={0: patterns.view("f2"), 1: patterns.view(ml_dtypes.bfloat16)}))


def test_r10_strided_arrays_come_back(tmp_path: Path) -> None:
    base = np.arange(24, dtype="f4").reshape(4, 6)
    views: dict[Key, Array] = {
        0: base.T,
        1: base[::-1, ::2],
        2: np.asfortranarray(base),
        3: np.broadcast_to(base[0], (3, 6)),
    }
    assert_round_trip(tmp_path / "c", Checkpoint(values=views))


def test_other_tools_can_open_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", Checkpoint(values={"w": np.ones(3, "f4")}))
    assert safetensors.numpy.load_file(tmp_path / "c")["value/0"].tolist() == [1, 1, 1]


def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_checkpoint(path, small())
    good = path.read_bytes()
    seed = random.randrange(2**32)
    print("seed", seed)  # noqa: T201
    chooser = random.Random(seed)
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ chooser.randrange(1, 256)]) + good[place + 1 :])
        with pytest.raises(CheckpointError):
            read_checkpoint(path)


def test_a_space_that_becomes_a_tab_is_found(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_checkpoint(path, Checkpoint(values={"w": np.ones(3, "f4")}, extra={"pad": " "}))
    good = path.read_bytes()
    for place in (i for i, byte in enumerate(good) if byte == ord(" ")):
        path.write_bytes(good[:place] + b"\t" + good[place + 1 :])
        with pytest.raises(CheckpointError):
            read_checkpoint(path)


def test_any_missing_or_added_end_is_found(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_checkpoint(path, small())
    good = path.read_bytes()
    for data in (*(good[:size] for size in range(len(good))), good + b"\0", good + good):
        path.write_bytes(data)
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(path)
        assert caught.value.path == str(path)
        assert str(path) in str(caught.value)


class _Marker:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_r50_a_pickle_is_refused_and_nothing_runs(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "c").write_bytes(pickle.dumps(_Marker(marker), protocol))
    with pytest.raises(CheckpointError, match="no gradkv checkpoint"):
        read_checkpoint(tmp_path / "c")
    assert not marker.exists()


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 8, b"\xff" * 64, b"\x02" + bytes(7) + b"{}", b"\x40" + bytes(7) + b"[" * 64]
)
def test_junk_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "c").write_bytes(data)
    with pytest.raises(CheckpointError, match="no gradkv checkpoint"):
        read_checkpoint(tmp_path / "c")


def test_a_header_is_read_without_the_arrays(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_checkpoint(path, small())
    header = read_header(path)
    assert (header.save, header.rounds) == ("of-this-time", {"w": 5, 3: 1})
    assert bytes.fromhex(header.digest) == safetensors.numpy.load_file(path)[DIGEST].tobytes()
    data = bytearray(path.read_bytes())
    data[-40] ^= 1  # of an array: not looked at
    path.write_bytes(data)
    assert read_header(path) == header
    path.write_bytes(b"[" * 100)
    for missing in (path, tmp_path / "nothing", tmp_path):
        with pytest.raises(CheckpointError, match=str(missing)):
            read_header(missing)


def test_no_two_saves_have_the_same_name() -> None:
    assert len({new_save() for _ in range(100)}) == 100


def test_a_path_that_no_file_can_have_is_reported(tmp_path: Path) -> None:
    for path in (tmp_path / "a\0b", tmp_path / ("a" * 1000)):
        with pytest.raises(CheckpointError, match="cannot be written"):
            write_checkpoint(path, Checkpoint())
        for read in (read_checkpoint, read_header):
            with pytest.raises(CheckpointError):
                read(path)


def test_foreign_safetensors_and_missing_files_are_refused(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "c", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="no gradkv checkpoint"):
        read_checkpoint(tmp_path / "c")
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_checkpoint(missing)


def forge(path: Path, arrays: dict[str, Array], **manifest: Any) -> None:
    """Write a file with a right digest and any content."""
    whole = {"tensors": [], "steps": [], "optimizer": None, "extra": {}} | manifest
    metadata = {
        "format": module.FORMAT,
        "version": str(module.VERSION),
        "manifest": msgspec.json.encode(whole).decode(),
    }
    path.unlink(missing_ok=True)
    module._write_draft(path, {DIGEST: np.zeros(DIGEST_BYTES, np.uint8), **arrays}, metadata)


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        ({"tensors": [["value/0", "value", "w", ""]]}, "lacks the tensor"),
        ({"tensors": [["a", "value", "w", ""], ["a", "value", "v", ""]]}, "lacks the tensor"),
        ({"tensors": [["a", "code", "w", ""]]}, "unknown kind"),
        ({"tensors": [["a", "value", 1.5, ""]]}, "Expected"),
        ({"tensors": [["a", "value", "w", ""], ["b", "state", "w", "m"]]}, "does not fit"),
        ({"tensors": [["a", "value", "w", ""], ["b", "master", "w", ""]]}, "must be float32"),
        ({"tensors": [["a", "value", "w", ""]]}, "belong to no key: b"),
        ({"steps": [["w", -1]]}, "Expected"),
        ({"rounds": [["w", -1]]}, "Expected"),
        ({"optimizer_name": 3}, "Expected"),
        ({"extra": 3}, "Expected"),
    ],
)
def test_forged_files_are_refused_cleanly(tmp_path: Path, forged: dict[str, Any], reason: str) -> None:
    forge(tmp_path / "c", {"a": np.ones(3, "f4"), "b": np.ones(4, "f8")}, **forged)
    with pytest.raises(CheckpointError, match=reason):
        read_checkpoint(tmp_path / "c")


def test_a_later_version_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "VERSION", 2)
        write_checkpoint(tmp_path / "c", small())
    with pytest.raises(CheckpointError, match="version 2, this program reads version 1"):
        read_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("place", ["os.fsync", "pathlib.Path.replace", "safetensors.numpy.save_file"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "stop"])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, failure: BaseException
) -> None:
    path = tmp_path / "c"
    write_checkpoint(path, Checkpoint(extra={"old": True}))

    def fail(*_: Any, **__: Any) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(place, fail)
        with pytest.raises(CheckpointError if isinstance(failure, OSError) else KeyboardInterrupt):
            write_checkpoint(path, small())
    assert read_checkpoint(path).extra == {"old": True}
    assert list(tmp_path.iterdir()) == [path]


def test_the_draft_is_flushed_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def flush(handle: int) -> None:
        events.append("flush")
        fsync(handle)

    def rename(self: Path, to: Path) -> Path:
        events.append("rename")
        return replace(self, to)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "replace", rename)
    write_checkpoint(tmp_path / "c", small())
    assert events == ["flush", "rename", "flush"]


def test_the_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write_checkpoint(tmp_path / "c", Checkpoint())
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_folder_that_is_none_is_reported(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_checkpoint(tmp_path / folder / "c", Checkpoint())


@pytest.mark.parametrize(
    "checkpoint",
    [
        Checkpoint(values={"w": np.ones(2, "c8")}),
        Checkpoint(values={"w": np.array([{}, []], object)}),
        Checkpoint(values={"w": np.ones(2, "f2")}, masters={"w": np.ones(2, "f8")}),
        Checkpoint(values={"w": np.ones(2, "f2")}, masters={"w": np.ones((1, 2), "f4")}),
        Checkpoint(values={"w": np.ones(2, "f4")}, state={"w": {"m": np.ones(3, "f4")}}),
        Checkpoint(state={"w": {"m": np.ones((2, 2), "f4")}}),
        Checkpoint(values={"w": np.ones(2, "f4")}, residuals={"w": np.ones(3, "f4")}),
        Checkpoint(values={"w": np.ones(0, "f4")}, residuals={"w": np.ones(1, "f4")}),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, checkpoint: Checkpoint) -> None:
    with pytest.raises(ArrayError, match="'w'"):
        write_checkpoint(tmp_path / "c", checkpoint)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "checkpoint",
    [
        Checkpoint(extra={"x": float("nan")}),
        Checkpoint(extra={"x": object()}),
        Checkpoint(extra={"x": (1, 2)}),
        Checkpoint(extra={"x": {1: 2}}),
        Checkpoint(steps={True: 1}),
        Checkpoint(steps={"w": -1}),
        Checkpoint(rounds={"w": -1}),
        Checkpoint(values={1.5: np.ones(2)}),  # type: ignore[dict-item]
        Checkpoint(values={"\ud800": np.ones(2)}),
    ],
)
def test_what_would_not_come_back_is_refused(tmp_path: Path, checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_checkpoint(tmp_path / "c", checkpoint)
    assert not list(tmp_path.iterdir())
