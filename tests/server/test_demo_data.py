"""The demo's images: the split, files kept between processes, IDX files, what is said when something is missing."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import KVStoreError
from kvstore.server import demo_data
from kvstore.server.demo_data import Images, load_images, read_fashion_mnist, read_idx, split


def _write_idx(path: Path, array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], kind: int = 8) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


def test_digits_are_split_by_seed() -> None:
    pytest.importorskip("sklearn")
    images = load_images("digits", 3)
    assert images.train_images.shape == (1437, 64) and images.test_images.shape == (360, 64)
    assert images.train_images.dtype == np.uint8 and images.train_images.max() == images.brightest == 16
    assert set(images.test_labels) == set(range(10))
    again, other = load_images("digits", 3), load_images("digits", 4)
    assert np.array_equal(images.test_images, again.test_images)
    assert not np.array_equal(images.test_images, other.test_images)


def test_split_keeps_every_image_once_with_its_label() -> None:
    labels = np.arange(101, dtype=np.uint8)
    found = split(labels[:, None] * np.ones((1, 3), np.uint8), labels, seed=0, brightest=100)
    assert len(found.test_labels) == 21
    assert sorted([*found.train_labels, *found.test_labels]) == list(range(101))
    assert (found.train_images == found.train_labels[:, None]).all()
    assert (found.test_images == found.test_labels[:, None]).all()


def test_saved_images_are_loaded_again(tmp_path: Path) -> None:
    images = split(np.arange(40, dtype=np.uint8).reshape(20, 2), np.arange(20, dtype=np.uint8), 0, brightest=39)
    images.save(tmp_path / "images.npz")
    loaded = Images.load(tmp_path / "images.npz")
    assert loaded.brightest == 39
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        assert np.array_equal(getattr(loaded, name), getattr(images, name))


def test_fashion_mnist_is_read_from_its_four_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    pictures = {part: rng.integers(0, 256, (count, 4, 5), np.uint8) for part, count in (("train", 6), ("t10k", 3))}
    for part, images in pictures.items():
        _write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images)
        _write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(len(images), dtype=np.uint8))
    monkeypatch.setattr(demo_data, "FASHION_MNIST", tmp_path)
    found = load_images("fashion-mnist", seed=9)
    assert np.array_equal(found.train_images, pictures["train"].reshape(6, 20))
    assert np.array_equal(found.test_images, pictures["t10k"].reshape(3, 20))
    assert found.train_labels.tolist() == [0, 1, 2, 3, 4, 5] and found.test_labels.tolist() == [0, 1, 2]
    assert found.brightest == 255


def test_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(KVStoreError, match="dataset-fashion-mnist"):
        read_fashion_mnist(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"\0\0\x08"), gzip.compress(b"\0\0\x08\x01\0\0\0\x05four"),
     gzip.compress(b"\0\0\x0d\x01\0\0\0\x01f"), gzip.compress(b"\0\0\x08\x01\0\0\0\x04four")[:-9]],
    ids=["empty", "no gzip", "half a header", "an element missing", "floats", "cut off"],
)  # fmt: skip
def test_files_that_are_no_idx_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(content)
    with pytest.raises(KVStoreError, match=r"x\.gz is no"):
        read_idx(path)


def test_missing_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(KVStoreError, match=r"scikit-learn is not installed.*pip install 'gradkv\[demo\]'"):
        load_images("digits", 0)
