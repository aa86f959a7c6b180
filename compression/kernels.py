"""Chooses the twin of the kernels for an array, once: NumPy, numba or CuPy.

`KVSTORE_KERNELS` = auto (numba where it installs, else NumPy), numba, or numpy.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol, cast

import numpy as np

from kvstore.compression import kernels_numpy
from kvstore.compression.codec import Array
from kvstore.errors import ArrayError, ConfigError

log = logging.getLogger(__name__)

SETTING = "KVSTORE_KERNELS"
CHOICES = ("auto", "numba", "numpy")


class Kernels(Protocol):
    """What every twin offers; contracts are in `kernels_numpy`, the reference.

    Every twin checks the arrays it is given (dtype, one dimension, sizes), takes read-only inputs, and copies
    where it cannot work in place.
    """

    NAME: str

    def max_abs(self, x: Array) -> float: ...
    def quantise2(self, gradient: Array, residual: Array, threshold: float, out: Array) -> None: ...
    def decode2(self, data: Array, threshold: float, out: Array) -> None: ...
    def decode2_add(self, data: Array, threshold: float, out: Array) -> None: ...
    def decode2_add_many(self, data: Sequence[Array], threshold: float, out: Array) -> None: ...
    def empty_bytes(self, n: int, like: Array) -> Array: ...
    def to_host(self, data: Array) -> Array: ...
    def to_device(self, data: Array, like: Array) -> Array: ...
    def warm_up(self) -> None: ...


def kernels_for(array: Array) -> Kernels:
    """The kernels that work where `array` lies.

    Raises:
        ArrayError: it is of neither NumPy nor CuPy.
    """
    if isinstance(array, np.ndarray):
        return chosen_kernels()
    if type(array).__module__.partition(".")[0] == "cupy":
        return _load("kernels_cupy")
    raise ArrayError(f"codecs take NumPy and CuPy arrays, got {type(array).__name__}; convert it first")


def family_for(family: str, array: Array) -> Any:
    """The kernels of one family of codecs, such as `dense`, that work where `array` lies: a module `FAMILY_TWIN`.

    Raises:
        ArrayError: the array is of neither NumPy nor CuPy.
    """
    return family_of(family, kernels_for(array))


def family_of(family: str, twin: Kernels) -> Any:
    """The kernels of one family that go with a twin."""
    return _load(f"{family}_{twin.NAME}")


def mover_for(array: Array) -> Kernels:
    """Where `array` lies, for `to_host` and `to_device` only: does not load numba, which raw pushes never need."""
    if type(array).__module__.partition(".")[0] == "cupy":
        return _load("kernels_cupy")
    return cast(Kernels, kernels_numpy)


@cache
def chosen_kernels() -> Kernels:
    """The kernels of the CPU that `KVSTORE_KERNELS` asks for; the setting is read once."""
    return cpu_kernels(os.environ.get(SETTING, "auto"))


@cache
def cpu_kernels(choice: str) -> Kernels:
    """The kernels of the CPU.

    Raises:
        ConfigError: `choice` is none of auto, numba, numpy, or numba was asked for and does not import.
    """
    if choice not in CHOICES:
        raise ConfigError(f"{SETTING}={choice!r}: allowed is one of {', '.join(CHOICES)}")
    if choice == "numpy":
        return cast(Kernels, kernels_numpy)
    try:
        return _load("kernels_numba")
    except ImportError as error:
        if choice == "numba":
            raise ConfigError(f"{SETTING}=numba, but numba does not import: {error}; install numba") from error
        log.warning("numba does not import (%s): the NumPy kernels serve, which are about ten times slower", error)
        return cast(Kernels, kernels_numpy)


def warm_up() -> Kernels:
    """Compile the CPU kernels before they are needed; says so in the log when it takes over a second."""
    start = time.perf_counter()
    kernels = chosen_kernels()
    kernels.warm_up()
    seconds = time.perf_counter() - start
    if seconds > 1:
        log.info("compiled the %s kernels in %.1f s; later processes load them from the cache", kernels.NAME, seconds)
    return kernels


@cache
def _load(name: str) -> Kernels:
    return cast(Kernels, importlib.import_module(f"kvstore.compression.{name}"))
