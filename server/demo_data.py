"""Images for the demo: scikit-learn's digits, or Fashion-MNIST from Debian's package. Nothing is downloaded."""

from __future__ import annotations

import gzip
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import KVStoreError

CLASSES = 10

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts its files."""

_TEST_SHARE = 5
"""Of the digits, one in this many is for testing: 360 of 1797."""

_IDX_BYTES = 0x08
_FIELDS = ("train_images", "train_labels", "test_images", "test_labels")


@dataclass(frozen=True)
class Images:
    """Images uint8 of shape (count, pixels), 0 to `brightest`; labels uint8 of shape (count,), 0 to CLASSES - 1."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]
    brightest: int

    def save(self, path: Path) -> None:
        """Write all to an .npz file."""
        arrays = {name: getattr(self, name) for name in _FIELDS}
        with path.open("wb") as file:
            np.savez(file, brightest=self.brightest, **arrays)

    @staticmethod
    def load(path: Path) -> Images:
        """Read what `save` wrote; holds no objects, so runs no code."""
        with np.load(path, allow_pickle=False) as file:
            train_images, train_labels, test_images, test_labels = (file[name] for name in _FIELDS)
            return Images(train_images, train_labels, test_images, test_labels, int(file["brightest"]))


def load_images(name: str, seed: int) -> Images:
    """Load 'digits' (split at random from `seed`) or 'fashion-mnist' (split as published).

    Raises:
        KVStoreError: scikit-learn or Debian's package is not installed; says how to install it.
    """
    return _digits(seed) if name == "digits" else read_fashion_mnist(FASHION_MNIST)


def _digits(seed: int) -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise missing_extra("scikit-learn", "the digits") from error
    digits: Any = load_digits()
    return split(digits.data.astype(np.uint8), digits.target.astype(np.uint8), seed, brightest=16)


def split(images: NDArray[np.uint8], labels: NDArray[np.uint8], seed: int, brightest: int) -> Images:
    """Shuffle by `seed`, and set every fifth image apart for testing (rounded up)."""
    order = np.random.default_rng(seed).permutation(len(images))
    tests = math.ceil(len(images) / _TEST_SHARE)
    test, train = order[:tests], order[tests:]
    return Images(images[train], labels[train], images[test], labels[test], brightest)


def read_fashion_mnist(folder: Path) -> Images:
    """Read the four files of Fashion-MNIST: 60000 images of 28 x 28 to train with, 10000 to test.

    Raises:
        KVStoreError: a file is missing or is none of Fashion-MNIST's.
    """
    train_images, test_images = (read_idx(folder / f"{part}-images-idx3-ubyte.gz") for part in ("train", "t10k"))
    train_labels, test_labels = (read_idx(folder / f"{part}-labels-idx1-ubyte.gz") for part in ("train", "t10k"))
    train, test = (images.reshape(len(images), -1) for images in (train_images, test_images))
    return Images(train, train_labels, test, test_labels, brightest=255)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read a gzipped IDX file of bytes: two zeros, the type, the number of dimensions, their sizes, the elements.

    Raises:
        KVStoreError: it is missing or not such a file.
    """
    try:
        data = gzip.decompress(path.read_bytes())
        zeros, kind, dimensions = struct.unpack_from(">HBB", data)
        shape = struct.unpack_from(f">{dimensions}I", data, 4)
    except FileNotFoundError as error:
        raise KVStoreError(
            f"Fashion-MNIST is not here: no file {path}; install Debian's package dataset-fashion-mnist "
            "(apt install dataset-fashion-mnist), or take --data digits"
        ) from error
    except (OSError, EOFError, struct.error) as error:
        raise KVStoreError(f"{path} is no gzipped IDX file: {error}") from error
    body = np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions)
    if (zeros, kind) != (0, _IDX_BYTES) or body.size != math.prod(shape):
        raise KVStoreError(f"{path} is no IDX file of bytes: {body.size} elements after the header, shape {shape}")
    return body.reshape(shape)


def missing_extra(package: str, purpose: str) -> KVStoreError:
    """The error for a package that comes with the extra `demo`."""
    return KVStoreError(f"{package} is not installed, which the demo needs for {purpose}: pip install 'gradkv[demo]'")
