"""The one place where users' arrays, of whatever library, meet NumPy.

No array library is imported here: an object of cupy, torch or jax proves that its library is loaded. Libraries that
are not known by name come in by `__array_interface__`, `__array__`, `__cuda_array_interface__` or DLPack.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kvstore.dtypes import DTYPES, DType, NDArray, is_float, named_dtype, stored_dtype
from kvstore.errors import ArrayError, NotSupportedError
from kvstore.messages import Key

_KINDS = {"numpy": "numpy", "cupy": "cupy", "torch": "torch", "jax": "jax", "jaxlib": "jax"}
_PROTOCOLS = ("__array_interface__", "__array__", "__cuda_array_interface__", "__dlpack__")
_DLPACK_CPU = 1
_FAILURES = (TypeError, ValueError, RuntimeError, BufferError, OverflowError)


@dataclass(frozen=True)
class Template:
    """What an array looks like: enough to make another one like it.

    `kind`: 'numpy', 'cupy', 'torch', 'jax', 'other' (by protocol) or 'python' (numbers, lists). `device`: what that
    library calls the device (a CuPy device number, a torch.device, a jax sharding); None on the host.
    """

    shape: tuple[int, ...]
    dtype: DType
    kind: str = "numpy"
    device: Any = None


def is_array(value: object) -> bool:
    """Is this an array of some library, rather than a number or a list?"""
    if isinstance(value, np.generic | int | float | list | tuple):
        return False
    return any(hasattr(value, name) for name in _PROTOCOLS) or _is_sparse(value)


def describe(array: Any, key: Key) -> Template:
    """Return shape, element type, library and device of `array`, without moving or copying its elements.

    Raises:
        ArrayError: not an array, or of a type that cannot be stored; names `key`.
        NotSupportedError: a sparse array.
    """
    kind = _kind(array, key)
    if kind == "torch":
        name = str(array.dtype).removeprefix("torch.")
        return Template(tuple(array.shape), named_dtype(name, key), kind, array.device)
    if kind in ("cupy", "jax"):
        device = int(array.device.id) if kind == "cupy" else array.sharding if hasattr(array, "sharding") else None
        return Template(tuple(array.shape), named_dtype(str(array.dtype), key), kind, device)
    host = _host(array, kind, key)
    return Template(host.shape, stored_dtype(host.dtype, key), kind)


def host_view(array: Any, key: Key, dtype: DType | None = None) -> NDArray:
    """Return `array` as a C-contiguous, aligned NumPy array in native byte order; a view of its memory where possible.

    Args:
        array: of any library; any strides, any byte order, read-only too.
        key: named in errors.
        dtype: what Python numbers become (the key's type); arrays keep their own.

    Raises:
        ArrayError: as `describe`; also numbers that `dtype` cannot hold.
    """
    kind = _kind(array, key)
    host = _numbers(array, key, dtype) if kind == "python" else _host(array, kind, key)
    native = stored_dtype(host.dtype, key)
    if host.dtype != native:
        host = host.astype(native)
    return np.require(host, requirements=("C", "A"))


def check_writable(out: Any, key: Key) -> Template:
    """Describe an array that is to be written into.

    Raises:
        ArrayError: it is read-only, immutable or not an array; names `key`.
    """
    if not is_array(out):
        raise ArrayError(f"out for key {key!r} is a {type(out).__name__}, not a writable array", key=key)
    template = describe(out, key)
    if template.kind == "jax":
        raise ArrayError(
            f"out for key {key!r} is a jax array, which is immutable: use the value that pull returns", key=key
        )
    if template.kind != "cupy" and not _on_torch_device(out, template):
        target = _target(out, template.kind, key)
        if not target.flags.writeable:
            raise ArrayError(f"out for key {key!r} is read-only: pass a writable array, or none", key=key)
        _check_overlap(target.strides, target.shape, key)
    elif template.kind == "cupy":
        _check_overlap(out.strides, out.shape, key)
    return template


def write_into(out: Any, values: Any, key: Key) -> None:
    """Set every element of `out`, of any strides, to `values` (as many elements, in C order, NumPy or CuPy).

    Memory between the elements of a strided `out` is left alone. `check_writable` has been called.
    """
    kind = _kind(out, key)
    if kind == "cupy":
        with out.device:
            out[...] = _loaded("cupy").asarray(_beside(values, out.device.id)).reshape(out.shape)
        return
    host = host_view(values, key)
    if kind == "torch" and out.device.type != "cpu":
        out.detach().copy_(_torch_tensor(host.reshape(out.shape)))
        return
    target = _target(out, kind, key)
    target[...] = host.reshape(target.shape)


def like(template: Template, values: Any) -> Any:
    """Return a new writable array of the template's library, device, shape and type (jax arrays are never writable).

    Args:
        values: NumPy or CuPy, as many elements as the template, in C order; copied.
    """
    if template.kind == "cupy":
        cupy = _loaded("cupy")
        with cupy.cuda.Device(template.device):
            return cupy.array(_beside(values, template.device), dtype=template.dtype).reshape(template.shape)
    host = host_view(values, "").reshape(template.shape).astype(template.dtype)  # astype copies
    if template.kind == "torch":
        return _torch_tensor(host).to(template.device)
    if template.kind == "jax":
        return _loaded("jax").device_put(host, template.device)
    return host


def _beside(values: Any, device: int) -> Any:
    """CuPy values that lie on another device come by the host, which needs no peer access."""
    elsewhere = _kind(values, "") == "cupy" and values.device.id != device
    return host_view(values, "") if elsewhere else values


def _kind(array: Any, key: Key) -> str:
    if isinstance(array, int | float | list | tuple) and not isinstance(array, np.generic):
        return "python"
    if _is_sparse(array):
        raise NotSupportedError(
            f"the value for key {key!r} is a {type(array).__name__}: sparse and masked ones are not supported",
            key=key,
        )
    for base in type(array).__mro__:
        kind = _KINDS.get(base.__module__.partition(".")[0])
        if kind is not None:
            return kind
    if is_array(array):
        return "other"
    raise ArrayError(f"the value for key {key!r} is a {type(array).__name__}, not an array", key=key)


def _is_sparse(value: Any) -> bool:
    """Row-sparse pairs, torch's sparse layouts, scipy's matrices. NumPy's masks hide elements too."""
    if type(value).__name__ in ("RowSparse", "RowSparseNDArray", "MaskedArray"):
        return True
    module = type(value).__module__
    return module.startswith("scipy.sparse") or (
        module.startswith("torch") and "strided" not in str(getattr(value, "layout", "strided"))
    )


def _host(array: Any, kind: str, key: Key) -> NDArray:
    """As a NumPy array, of any strides; a view where the memory is on the host."""
    try:
        if kind == "python":
            return _numbers(array, key, None)
        if kind == "cupy":
            return np.asarray(_loaded("cupy").asnumpy(array))
        if kind == "torch":
            return _torch_host(array)
        if kind == "other":
            return _by_protocol(array)
        return np.asarray(array)
    except _FAILURES as error:
        if isinstance(error, ArrayError):
            raise
        hint = " (inside jit? push and pull outside)" if "Tracer" in type(array).__name__ else ""
        raise ArrayError(
            f"the {type(array).__name__} for key {key!r} cannot be read{hint}: {error}", key=key
        ) from error


def _numbers(value: Any, key: Key, dtype: DType | None) -> NDArray:
    try:
        found = np.asarray(value)
    except _FAILURES as error:
        raise ArrayError(f"the list for key {key!r} is no regular array of numbers: {error}", key=key) from error
    named_dtype(found.dtype.name, key)
    if dtype is None:
        return found
    if (not is_float(dtype) and is_float(found.dtype)) or (dtype.kind == "b" != found.dtype.kind):
        raise ArrayError(f"key {key!r} holds {dtype.name}: {found.dtype.name} numbers do not fit", key=key)
    cast = found.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(cast, found):
        raise ArrayError(f"key {key!r} holds {dtype.name}: a number is out of its range", key=key)
    return cast


def _by_protocol(array: Any) -> NDArray:
    if hasattr(array, "__array_interface__") or hasattr(array, "__array__"):
        return np.asarray(array)
    if hasattr(array, "__cuda_array_interface__") or array.__dlpack_device__()[0] != _DLPACK_CPU:
        return np.asarray(importlib.import_module("cupy").asnumpy(_on_cuda(array)))
    return np.from_dlpack(array)


def _on_cuda(array: Any) -> Any:
    """A device array of a library without a name here, as a CuPy array of the same memory."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise ArrayError(
            f"a {type(array).__name__} on a CUDA device needs CuPy: pip install 'gradkv[cuda13]'"
        ) from error
    return cupy.asarray(array) if hasattr(array, "__cuda_array_interface__") else cupy.from_dlpack(array)


def _target(out: Any, kind: str, key: Key) -> NDArray:
    """The memory of `out` as NumPy. What offers `__array__` alone may hand out a copy: writes would be lost."""
    if kind == "other" and not (hasattr(out, "__array_interface__") or hasattr(out, "__dlpack__")):
        raise ArrayError(f"out for key {key!r} is a {type(out).__name__}, which cannot be written in place", key=key)
    return _host(out, kind, key)


def _check_overlap(strides: tuple[int, ...], shape: tuple[int, ...], key: Key) -> None:
    if 0 not in shape and any(stride == 0 and length > 1 for stride, length in zip(strides, shape, strict=True)):
        raise ArrayError(f"out for key {key!r} has stride 0: its elements share memory and cannot differ", key=key)


def _on_torch_device(out: Any, template: Template) -> bool:
    return template.kind == "torch" and template.device.type != "cpu"


def _torch_host(tensor: Any) -> NDArray:
    """A CPU tensor as a view of its memory; NumPy has no bfloat16 of its own, so that one goes through int16."""
    torch = _loaded("torch")
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).numpy()).view(DTYPES["bfloat16"])
    return np.asarray(tensor.numpy())


def _torch_tensor(host: NDArray) -> Any:
    torch = _loaded("torch")
    if host.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(host)


def _loaded(name: str) -> ModuleType:
    return sys.modules[name] if name in sys.modules else importlib.import_module(name)
