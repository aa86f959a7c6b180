"""What users of other stores ran into, on the stores of one process."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.arrays import host_view
from kvstore.dtypes import DTYPES
from kvstore.errors import (
    CheckpointError,
    ConfigError,
    KeyExistsError,
    NonFiniteError,
    NotSupportedError,
    ParameterError,
)
from kvstore.local import LocalStore

TWO_BIT = {"type": "2bit", "threshold": "0.5"}


@pytest.fixture(params=["local", "device", "device 2bit"])
def kv(request: pytest.FixtureRequest) -> LocalStore:
    kind, _, compression = request.param.partition(" ")
    store = LocalStore(kind)
    if compression:
        store.set_gradient_compression(TWO_BIT)
    return store


def full(value: float, *shape: int) -> Any:
    return np.full(shape or (64,), value, np.float32)


# --- R04: integer keys wrap, and 3 versus '3' ---------------------------------------------------------------------


def test_r04_wide_integer_keys_are_independent(kv: LocalStore) -> None:
    keys = [2, 2**32 + 2, 2**40 + 2, -2, 2**63 - 1, -(2**63)]
    for number, key in enumerate(keys):
        kv.init(key, full(number))
    assert [value[0] for value in kv.pull(keys)] == list(range(len(keys)))
    for key in (2**63, 2**64 + 2):
        with pytest.raises(ParameterError, match="9223372036854775807"):
            kv.init(key, full(0))


def test_r04_three_and_text_three_are_two_keys_even_in_one_call(kv: LocalStore) -> None:
    kv.init(3, full(1))
    kv.init("3", full(2))
    assert [value[0] for value in kv.pull([3, "3"])] == [1, 2]
    kv.init([1, "x"], [full(3), full(4)])
    assert [value[0] for value in kv.pushpull([1, "x"], [full(0.5), full(-0.5)])] == [0.5, -0.5]


def test_r04_text_keys_of_any_kind_round_trip(kv: LocalStore, tmp_path: Path) -> None:
    keys = ["", "/", "layer/0.weight", "x" * 1024, "вес", "重み", "a\0b", " ", "🗝"]
    kv.init(keys, [full(number) for number in range(len(keys))])
    kv.save(tmp_path / "all")
    with LocalStore("local") as again:
        again.load(tmp_path / "all")
        assert [value[0] for value in again.pull(keys)] == list(range(len(keys)))


# --- R05: no way to overwrite a value after init ------------------------------------------------------------------


def test_r05_init_twice_is_refused_and_broadcast_overwrites(kv: LocalStore) -> None:
    kv.init("w", full(1))
    with pytest.raises(KeyExistsError, match=r"'w' is already initialised; broadcast"):
        kv.init("w", full(2))
    assert kv.pull("w")[0] == 1
    assert kv.broadcast("w", full(2))[0] == 2
    assert kv.pull("w")[0] == 2


def test_r05_after_an_overwrite_residuals_and_optimizer_state_start_afresh() -> None:
    kv = LocalStore("device")
    kv.init("w", full(0))
    kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5, wd=0.0)
    kv.set_gradient_compression(TWO_BIT)
    kv.push("w", full(0.75))  # sends 0.5, keeps 0.25
    kv.broadcast("w", full(0))
    kv.push("w", full(0.25))
    assert kv.pull("w")[0] == 0  # 0.25 + the old 0.25 would have fired; the old momentum would have moved it


# --- R06: the optimizer sees the shape ----------------------------------------------------------------------------


def test_r06_updates_see_the_shape_of_the_key() -> None:
    kv = LocalStore("local")
    shapes = []
    kv.init("w", full(0, 4, 2))
    kv.set_updater(lambda key, gradient, value: shapes.append((gradient.shape, value.shape)))
    kv.push("w", full(1, 4, 2))
    assert shapes == [((4, 2), (4, 2))]


# --- R10: non-contiguous arrays -----------------------------------------------------------------------------------

GRID = np.arange(-48, 48, dtype=np.float32).reshape(8, 12) / 32
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda grid: grid.T,
    "every other": lambda grid: grid[::2, ::3],
    "backwards": lambda grid: grid[::-1, ::-1],
    "fortran": lambda grid: np.asfortranarray(grid),
    "stride 0": lambda grid: np.broadcast_to(grid[0], (5, 12)),
    "column": lambda grid: grid[:, 3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_r10_any_layout_gives_what_the_contiguous_copy_gives(kv: LocalStore, layout: str) -> None:
    view = LAYOUTS[layout](GRID)
    copy = np.ascontiguousarray(view)
    kv.init(["view", "copy"], [view, copy])
    np.testing.assert_array_equal(kv.pull("view"), copy)
    for _ in range(3):
        results = kv.pushpull(["view", "copy"], [[view, view], [copy, copy]])
        np.testing.assert_array_equal(*results)
        assert results[0].any()


def test_r10_pulling_into_a_view_leaves_the_rest_alone(kv: LocalStore) -> None:
    for name, view in LAYOUTS.items():
        memory = np.full((8, 12), -7, np.float32)
        out = view(memory)
        if name in ("fortran", "stride 0"):
            continue
        values = np.arange(out.size, dtype=np.float32).reshape(out.shape)
        kv.init(name, values)
        kv.pull(name, out=out)
        np.testing.assert_array_equal(out, values)
        assert np.count_nonzero(memory == -7) == memory.size - out.size


def test_r10_torch_channels_last(kv: LocalStore) -> None:
    torch = pytest.importorskip("torch")
    image = torch.arange(96.0).reshape(2, 3, 4, 4) / 32
    last = image.to(memory_format=torch.channels_last)
    kv.init(["plain", "last"], [image, last])
    plain, pulled = kv.pushpull(["plain", "last"], [[image, image], [last, last]])
    assert torch.equal(plain, pulled)
    assert plain.any()
    out = torch.full((2, 3, 4, 8), -7.0)
    kv.pull("last", out=out[..., ::2])
    assert torch.equal(out[..., ::2], pulled)
    assert bool((out[..., 1::2] == -7).all())


# --- R11: zero-size and 0-d arrays --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_r11_edge_shapes_keep_shape_and_type_and_sum_exactly(kv: LocalStore, shape: tuple[int, ...], name: str) -> None:
    value = np.ones(shape, DTYPES[name])
    kv.init("w", value)
    for _ in range(2):
        pulled = kv.pushpull("w", [value, value])
        assert (pulled.shape, pulled.dtype.name) == (shape, name)
        assert pulled.astype(float).tolist() == np.full(shape, 2.0).tolist()
    out = np.zeros(shape, DTYPES[name])
    kv.pull("w", out=out)
    assert out.tobytes() == pulled.tobytes()


# --- R12: sum or mean? --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [False, True])
def test_r12_lists_are_summed_and_one_worker_averages_to_itself(average: bool) -> None:
    kv = LocalStore("device", average=average)
    kv.init("w", full(0))
    assert kv.pushpull("w", full(1))[0] == 1
    assert kv.pushpull("w", [full(1), full(1)])[0] == 2  # devices of one worker add up; workers are averaged


def test_r12_two_halves_of_a_batch_are_one_batch() -> None:
    random = np.random.default_rng(12)
    samples = random.normal(size=(8, 64)).astype(np.float32)
    results = []
    for parts in (2, 1):
        kv = LocalStore("local")
        kv.init("w", full(0))
        kv.set_optimizer("sgd", learning_rate=0.1, wd=0.0, rescale_grad=1 / 8)
        for _ in range(3):
            kv.push("w", [part.sum(axis=0) for part in np.split(samples, parts)])
        results.append(kv.pull("w"))
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=1e-6)


# --- R14: row-sparse is refused, not crashed ----------------------------------------------------------------------


def test_r14_row_sparse_pull_names_what_to_do(kv: LocalStore) -> None:
    kv.init("w", full(1, 4, 2))
    with pytest.raises(NotImplementedError, match="pull the whole key"):
        kv.row_sparse_pull("w", out=full(0, 4, 2), row_ids=np.array([1, 2]))
    assert kv.pull("w").tolist() == full(1, 4, 2).tolist()


# --- R16: compression on the wrong store or with bad parameters ---------------------------------------------------


def test_r16_local_refuses_and_goes_on() -> None:
    kv = LocalStore("local")
    kv.init("w", full(0))
    with pytest.raises(NotSupportedError, match=r"'local'.*'device'"):
        kv.set_gradient_compression(TWO_BIT)
    assert kv.pushpull("w", full(0.25))[0] == 0.25


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({}, "type"),
        ({"type": "3bit"}, "3bit"),
        ({"type": "none"}, "clear_gradient_compression"),
        ({"threshold": 0.5}, "type"),
        ({"type": "2bit", "threshold": 0}, "threshold"),
        ({"type": "2bit", "threshold": "-1"}, "threshold"),
        ({"type": "2bit", "threshold": "abc"}, "threshold"),
        ({"type": "2bit", "threshold": "nan"}, "threshold"),
        ({"type": "2bit", "threshold": float("inf")}, "threshold"),
        ({"type": "2bit", "treshold": 0.5}, "threshold"),
    ],
)
def test_r16_bad_parameters_are_named_and_change_nothing(params: dict[str, Any], named: str) -> None:
    kv = LocalStore("device")
    kv.set_gradient_compression(TWO_BIT)
    kv.init("w", full(0))
    kv.push("w", full(0.25))
    with pytest.raises(ConfigError, match=named):
        kv.set_gradient_compression(params)
    assert kv.pushpull("w", full(0.25))[0] == 0.5


def test_r16_text_and_number_are_equal_and_the_setting_toggles() -> None:
    results = []
    for threshold in ("0.5", 0.5):
        kv = LocalStore("device")
        kv.init("w", full(0))
        seen = [kv.pushpull("w", full(0.25))[0]]  # raw
        kv.set_gradient_compression({"type": "2bit", "threshold": threshold})
        seen += [kv.pushpull("w", full(0.25))[0] for _ in range(3)]
        kv.clear_gradient_compression()
        seen += [kv.pushpull("w", full(0.25))[0] for _ in range(2)]
        results.append(seen)
    assert results[0] == results[1] == [0.25, 0, 0.5, 0, 0.5, 0.25]


# --- R21: one NaN or Inf ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_r21_a_poisoned_gradient_is_refused_and_leaves_no_trace(poison: float) -> None:
    kv = LocalStore("device")
    kv.set_gradient_compression(TWO_BIT)
    kv.init(["v", "w"], [full(0), full(0)])
    for _ in range(4):
        kv.push(["v", "w"], [full(0.125), [full(0.125), full(0)]])
    bad = full(0.125)
    bad[7] = poison
    with pytest.raises(NonFiniteError, match=r"'w', rank 0: 1 of 64") as caught:
        kv.push(["v", "w"], [full(0.125), [full(0.125), bad]])
    assert (caught.value.key, caught.value.rank, caught.value.count) == ("w", 0, 1)
    delivered = [kv.pushpull(["v", "w"], [full(0.125), [full(0.125), full(0)]]) for _ in range(4)]
    for key in (0, 1):
        assert [step[key].tolist() for step in delivered] == [[x] * 64 for x in (0, 0, 0, 0.5)]


def test_r21_without_compression_it_is_seen_not_hidden() -> None:
    kv = LocalStore("local")
    kv.init(["v", "w"], [full(0), full(0)])
    bad = full(1)
    bad[7] = np.nan
    v, w = kv.pushpull(["v", "w"], [full(1), bad])
    assert np.isfinite(v).all()
    assert np.isnan(w).sum() == 1
    assert np.isfinite(kv.pushpull("w", full(1))).all()


def test_r21_propagate_sends_the_chunk_raw_and_recovers() -> None:
    kv = LocalStore("device")
    kv.set_gradient_compression({**TWO_BIT, "on_nonfinite": "propagate"})
    kv.init("w", full(0))
    kv.push("w", full(0.25))
    bad = full(1)
    bad[7] = np.nan
    pulled = kv.pushpull("w", bad)
    assert np.isnan(pulled[7])
    assert pulled[0] == 1.25
    assert kv.pushpull("w", full(0.5))[0] == 0.5


# --- R27: optimizer state, in one process -------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_r27_three_steps_saved_and_one_more_are_four(tmp_path: Path, optimizer: str) -> None:
    settings: dict[str, Any] = {"learning_rate": 0.1, "wd": 0.0} | ({"momentum": 0.9} if optimizer == "sgd" else {})
    gradients = np.random.default_rng(27).normal(size=(4, 64)).astype(np.float32)
    whole = LocalStore("local")
    whole.init("w", full(1))
    whole.set_optimizer(optimizer, **settings)
    for step, gradient in enumerate(gradients):
        if step == 3:
            whole.save_optimizer_states(tmp_path / "states")
            value = whole.pull("w")
        whole.push("w", gradient)
    again = LocalStore("local")
    again.init("w", value)
    again.set_optimizer(optimizer, **settings)
    again.load_optimizer_states(tmp_path / "states")
    again.push("w", gradients[3])
    np.testing.assert_array_equal(again.pull("w"), whole.pull("w"))
    marker = tmp_path / "marker"
    (tmp_path / "states").write_bytes(f"cos\nsystem\n(S'touch {marker}'\ntR.".encode())
    with pytest.raises(CheckpointError):
        again.load_optimizer_states(tmp_path / "states")
    assert not marker.exists()
    again.push("w", full(0))


# --- R49: roles start at import; attributes -----------------------------------------------------------------------


@pytest.mark.parametrize("role", ["", "worker", "server", "scheduler", "nonsense"])
def test_r49_import_never_blocks_and_starts_nothing(role: str) -> None:
    code = "import kvstore, kvstore.local, threading; print(threading.active_count())"
    environment = {"DMLC_ROLE": role, "DMLC_PS_ROOT_URI": "192.0.2.1", "DMLC_PS_ROOT_PORT": "9"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout.strip(), done.stderr) == ("1", "")


@pytest.mark.parametrize("kind", ["local", "device"])
def test_r49_attributes_are_right(kind: str) -> None:
    kv = LocalStore(kind)
    assert (kv.type, kv.rank, kv.num_workers, kv.num_dead_node()) == (kind, 0, 1, 0)


# --- R58: jax arrays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_r58_jax_arrays_are_usable_after_two_pushes(name: str) -> None:
    jax = pytest.importorskip("jax")
    kv = LocalStore("local")
    array = jax.numpy.linspace(-3, 3, 64).astype(name)
    kv.init("w", array)
    for _ in range(2):
        pulled = kv.pushpull("w", array)
        assert isinstance(pulled, jax.Array)
        assert pulled.sharding == array.sharding
        assert host_view(pulled, "w").tobytes() == host_view(array, "w").tobytes()
    with pytest.raises(ValueError, match="immutable: use the value that pull returns"):
        kv.pull("w", out=array)
