"""Sums of a list of arrays, in order, on the host and on a stand-in for a device."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.arrays import Template
from kvstore.dtypes import DTYPES
from kvstore.errors import ArrayError
from kvstore.reduction import check_match, flattened, on_cuda, sum_in_order, to_host

F32 = DTYPES["float32"]


def test_the_order_of_the_list_is_the_order_of_the_additions() -> None:
    arrays = [np.array([value], np.float32) for value in (1.0, 2.0**24, -(2.0**24), 3.0)]
    assert sum_in_order(arrays, F32).tolist() == [3.0]
    assert sum_in_order([arrays[i] for i in (1, 2, 0, 3)], F32).tolist() == [4.0]


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_is_summed_in_float32(name: str) -> None:
    arrays = [np.array([value], DTYPES[name]) for value in (1.0, 2.0**-12, 2.0**-12)]
    total = sum_in_order(arrays, DTYPES[name])
    assert total.dtype == np.float32
    assert total.tolist() == [1.0 + 2.0**-11]


def test_integers_wrap_and_bools_are_joined_without_a_warning() -> None:
    assert sum_in_order([np.array([127], np.int8), np.array([1], np.int8)], DTYPES["int8"]).tolist() == [-128]
    assert sum_in_order([np.array([True, False]), np.array([True, False])], DTYPES["bool"]).tolist() == [True, False]


def test_the_sum_of_one_is_a_copy() -> None:
    array = np.ones(3, np.float32)
    total = sum_in_order([array], F32)
    assert not np.shares_memory(total, array)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.ones((2, 1), np.float32), r"shape \(2, 1\) of float32, the key has shape \(2,\)"),
        (np.ones(2), "float64"),
        (np.ones(2, np.int32), "int32"),
        ([1.0], r"shape \(1,\)"),
        ("text", "not an array"),
    ],
)
def test_what_does_not_match_the_key_is_refused_by_name(array: Any, text: str) -> None:
    with pytest.raises(ArrayError, match=f"'w'.*{text}"):
        check_match(Template((2,), F32), array, "w", "push")


def test_numbers_match_if_they_fit() -> None:
    check_match(Template((2,), F32), [1, 2], "w", "push")
    with pytest.raises(ArrayError, match="int8"):
        check_match(Template((), DTYPES["int8"]), 200, "w", "push")
    with pytest.raises(ArrayError, match="do not fit"):
        check_match(Template((), DTYPES["int8"]), 1.5, "w", "push")


class FakeDevice:
    """Counts how often it was made current."""

    entered = 0
    id = 0

    def __enter__(self) -> None:
        type(self).entered += 1

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module in cupy's place whose arrays are NumPy's under another name."""
    module = types.ModuleType("cupy")
    methods = {"device": FakeDevice(), "set": lambda self, host: self.__setitem__(slice(None), host)}
    module.ndarray = type("ndarray", (np.ndarray,), {"__module__": "cupy", **methods})  # type: ignore[attr-defined]
    module.asnumpy = lambda array: np.array(array).view(np.ndarray)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    yield module


def test_a_sum_stays_where_its_first_array_lies(cupy: Any) -> None:
    host = np.ones(3, np.float32)
    device = host.view(cupy.ndarray)
    assert type(flattened(device, "w", F32, on_device=True)) is cupy.ndarray
    assert type(flattened(device, "w", F32, on_device=False)) is np.ndarray
    before = FakeDevice.entered
    for arrays, kind in (([device, host, device], cupy.ndarray), ([host, device, device], np.ndarray)):
        total = sum_in_order(arrays, F32)
        assert type(total) is kind
        assert total.tolist() == [3, 3, 3]
    assert FakeDevice.entered == before + 1
    assert on_cuda(device) and not on_cuda(host)
    assert type(to_host(device)) is np.ndarray
    assert to_host(host) is host
