"""The adapter between users' arrays and NumPy, for every library at hand."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore.arrays import check_writable, describe, host_view, is_array, like, write_into
from kvstore.dtypes import DTYPES, NDArray
from kvstore.errors import ArrayError, NotSupportedError

BASE = np.arange(24, dtype=np.float32).reshape(4, 6)
LAYOUTS: dict[str, Any] = {
    "contiguous": BASE,
    "transposed": BASE.T,
    "fortran": np.asfortranarray(BASE),
    "step": BASE[::2, ::3],
    "negative": BASE[::-1, ::-1],
    "stride 0": np.broadcast_to(BASE[0], (3, 6)),
    "big endian": BASE.astype(">f4"),
    "unaligned": np.frombuffer(b"x" + BASE.tobytes(), np.float32, 24, 1),
    "0-d": np.array(3.5, np.float32),
    "scalar": np.float32(3.5),
    "empty": np.zeros((3, 0), np.float32),
}


class DlpackOnly:
    """An array that offers DLPack and nothing else."""

    def __init__(self, array: NDArray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class CopyOnly:
    """An array that offers `__array__` alone, so that writes would go to a copy."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray:
        return np.ones(3, np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_becomes_contiguous_and_native_with_its_shape(layout: str) -> None:
    array = LAYOUTS[layout]
    view = host_view(array, "w")
    assert (view.shape, view.dtype) == (array.shape, np.dtype(np.float32))
    assert view.flags.c_contiguous
    assert view.flags.aligned
    np.testing.assert_array_equal(view, np.asarray(array))


def test_a_contiguous_array_is_not_copied_and_may_be_read_only() -> None:
    array = np.arange(4.0)
    array.flags.writeable = False
    assert np.shares_memory(host_view(array, "w"), array)


@pytest.mark.parametrize("name", DTYPES)
def test_every_element_type_is_described_by_name(name: str) -> None:
    template = describe(np.ones((2, 3), DTYPES[name]), "w")
    assert (template.shape, template.dtype.name, template.kind) == ((2, 3), name, "numpy")


@pytest.mark.parametrize(
    "array", [np.ones(2, complex), np.array(["a"]), np.array([object()]), np.zeros(1, "M8[s]"), b"x"]
)
def test_other_element_types_are_refused(array: Any) -> None:
    with pytest.raises(ArrayError, match="'emb'"):
        describe(array, "emb")


@pytest.mark.parametrize("value", ["text", None, 1j, object(), {1: 2}, [1, [2]], ["a"], [1 << 80]])
def test_what_is_no_array_is_refused(value: Any) -> None:
    with pytest.raises(ArrayError, match="'w'"):
        host_view(value, "w")


def test_numbers_and_nested_lists_become_arrays() -> None:
    assert host_view(2, "w").dtype == np.int64
    assert host_view([[1.0], [2.0]], "w").shape == (2, 1)
    assert not is_array([1.0]) and not is_array(1) and not is_array(np.float32(1)) and is_array(np.ones(()))


@pytest.mark.parametrize(
    ("value", "name", "fits"),
    [
        (1.5, "bfloat16", True),
        (2, "float16", True),
        ([1, 2], "uint8", True),
        (300, "uint8", False),
        (-1, "uint64", False),
        (1.5, "int32", False),
        (True, "bool", True),
        (1, "bool", False),
    ],
)
def test_numbers_take_the_type_of_the_key_if_they_fit(value: Any, name: str, fits: bool) -> None:
    if fits:
        view = host_view(value, "w", DTYPES[name])
        assert view.dtype.name == name
        assert view.tolist() == value
    else:
        with pytest.raises(ArrayError, match=name):
            host_view(value, "w", DTYPES[name])


@pytest.mark.parametrize("layout", ["transposed", "fortran", "step", "negative", "big endian", "0-d", "empty"])
def test_writing_fills_any_layout_and_nothing_else(layout: str) -> None:
    memory = np.full(200, -1.0, np.float32)
    array = LAYOUTS[layout]
    grid = memory[:96].reshape(8, 12)
    out = {"transposed": grid[:4, :6].T, "step": grid[::4, ::4][:2, :2], "negative": grid[:4, :6][::-1, ::-1]}.get(
        layout
    )
    out = np.array(array, copy=True, order="K") if out is None else out
    check_writable(out, "w")
    write_into(out, np.arange(out.size, dtype=np.float32) + 1, "w")
    np.testing.assert_array_equal(out, np.arange(out.size).reshape(out.shape) + 1)
    if out.base is not None and np.shares_memory(out, memory):
        assert np.count_nonzero(memory == -1) == memory.size - out.size


def test_what_cannot_be_written_is_refused() -> None:
    locked = np.ones(3)
    locked.flags.writeable = False
    shared = np.lib.stride_tricks.as_strided(np.ones(1), (3,), (0,))
    for out, text in [
        (locked, "read-only"),
        (shared, "stride 0"),
        (CopyOnly(), "in place"),
        ([1.0], "list"),
        (3, "int"),
    ]:
        with pytest.raises(ArrayError, match=f"'w'.*{text}"):
            check_writable(out, "w")


def test_dlpack_alone_is_enough_both_ways() -> None:
    memory = np.arange(6, dtype=np.float32)
    array = DlpackOnly(memory[::2])
    assert describe(array, "w").kind == "other"
    assert host_view(array, "w").tolist() == [0, 2, 4]
    if np.from_dlpack(array).flags.writeable:  # NumPy 1 hands out read-only views
        check_writable(array, "w")
        write_into(array, np.array([7, 8, 9], np.float32), "w")
        assert memory.tolist() == [7, 1, 8, 3, 9, 5]
    assert like(describe(array, "w"), np.ones(3, np.float32)).tolist() == [1, 1, 1]


def test_array_protocol_alone_is_enough_to_read() -> None:
    assert host_view(CopyOnly(), "w").tolist() == [1, 1, 1]


def test_like_makes_a_new_writable_array_of_the_same_type() -> None:
    values = np.arange(6, dtype=np.float32)
    for name in ("float32", "bfloat16", "int8"):
        new = like(describe(np.zeros((2, 3), DTYPES[name]), "w"), values)
        assert (new.shape, new.dtype.name, new.flags.writeable) == ((2, 3), name, True)
        assert not np.shares_memory(new, values)


def test_sparse_and_masked_arrays_are_not_supported() -> None:
    class RowSparse:
        indices, values = [0], np.ones((1, 2))

    for value in (RowSparse(), np.ma.masked_array([1.0, 2.0], [True, False])):
        with pytest.raises(NotSupportedError, match="'w'"):
            describe(value, "w")


# --- CuPy: its calls are checked on a stand-in here, and for real by the tests that need a GPU --------------------


class FakeDevice:
    id = 3

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module in cupy's place whose arrays are NumPy's under another name."""
    module = types.ModuleType("cupy")
    ndarray = type("ndarray", (np.ndarray,), {"__module__": "cupy", "device": FakeDevice()})
    module.asnumpy = lambda array: np.array(array).view(np.ndarray)  # type: ignore[attr-defined]
    module.asarray = np.asarray  # type: ignore[attr-defined]
    module.array = lambda array, dtype: np.array(array, dtype).view(ndarray)  # type: ignore[attr-defined]
    module.ndarray = ndarray  # type: ignore[attr-defined]
    module.cuda = types.SimpleNamespace(Device=lambda number: FakeDevice())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    yield module


def test_cupy_arrays_go_through_cupy(cupy: Any) -> None:
    array = cupy.array(BASE, np.float32)
    template = describe(array, "w")
    assert (template.kind, template.device, template.dtype.name) == ("cupy", 3, "float32")
    view = host_view(array, "w")
    assert type(view) is np.ndarray
    check_writable(array[::2], "w")
    write_into(array[::2], np.zeros(12, np.float32), "w")
    assert array.sum() == BASE[1::2].sum()
    new = like(template, np.ones(24, np.float32))
    assert (type(new), new.shape) == (cupy.ndarray, (4, 6))


# --- torch and jax, where they are installed ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64", "int64", "uint8", "bool"])
def test_torch_tensors_of_every_type_come_and_go(name: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    for view in (tensor, tensor.T, tensor[:, ::2], tensor[0].expand(4, 3)):
        found = host_view(view, "w")
        assert (found.dtype.name, found.shape) == (name, tuple(view.shape))
        np.testing.assert_array_equal(found.astype(float), np.array(view.to(torch.float64).tolist()))
    new = like(describe(tensor, "w"), host_view(tensor, "w"))
    assert isinstance(new, torch.Tensor)
    assert torch.equal(new, tensor)
    check_writable(tensor[:, ::2], "w")
    write_into(tensor[:, ::2], np.ones(4, DTYPES[name]), "w")
    assert tensor.to(torch.int64).tolist() == torch.tensor([[1, 1, 1], [1, 4, 1]]).to(tensor.dtype).long().tolist()


def test_torch_parameters_channels_last_and_shared_memory() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(2, 3))
    assert describe(weight, "w").kind == "torch"
    write_into(weight, np.zeros(6, np.float32), "w")
    assert weight.sum().item() == 0
    image = torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last)
    np.testing.assert_array_equal(host_view(image, "w"), np.arange(48).reshape(1, 3, 4, 4))
    with pytest.raises(ArrayError, match="stride 0"):
        check_writable(torch.ones(1).expand(3), "w")
    with pytest.raises(NotSupportedError):
        describe(torch.eye(3).to_sparse(), "w")
    with pytest.raises(ArrayError, match="complex64"):
        describe(torch.ones(2, dtype=torch.complex64), "w")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int32", "bool"])
def test_jax_arrays_are_read_and_made_but_never_written(name: str) -> None:
    jax = pytest.importorskip("jax")
    array = jax.numpy.arange(6).reshape(2, 3).astype(name)
    for _ in range(2):  # export must not use the array up
        assert host_view(array, "w").dtype.name == name
    new = like(describe(array, "w"), host_view(array, "w"))
    assert isinstance(new, jax.Array)
    assert (new.dtype.name, new.tolist()) == (name, array.tolist())
    with pytest.raises(ArrayError, match="immutable"):
        check_writable(array, "w")
    with pytest.raises(ArrayError, match="inside jit"):
        jax.jit(lambda x: host_view(x, "w").sum())(array)


def test_ml_dtypes_values_pass_bit_for_bit() -> None:
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(ml_dtypes.bfloat16)
    assert host_view(bits[::-1], "w").tobytes() == bits[::-1].tobytes()
