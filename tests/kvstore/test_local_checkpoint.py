"""Saving and loading a local store; what does not fit changes nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.checkpoint import read_checkpoint, write_checkpoint
from kvstore.dtypes import DTYPES
from kvstore.errors import CheckpointError, ConfigError
from kvstore.local import LocalStore

TWO_BIT = {"type": "2bit", "threshold": 0.5}
ADAM = {"learning_rate": 0.1, "wd": 0.0}


def full(value: float, n: int = 64) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full(n, value, np.float32)


def trained(steps: int) -> LocalStore:
    kv = LocalStore("device")
    kv.init({"w": full(1), 3: np.ones((4, 16), np.float16), "n": np.zeros(2, np.int32)})
    kv.set_optimizer("adam", **ADAM)
    kv.set_gradient_compression(TWO_BIT)
    more(kv, steps)
    return kv


def more(kv: LocalStore, steps: int) -> None:
    for _ in range(steps):
        kv.push(["w", 3], [[full(0.3), full(0.2)], np.full((4, 16), 0.25, np.float16)])


def values(kv: LocalStore) -> Any:
    return [x.tolist() for x in kv.pull(["w", 3, "n"])]


def test_a_loaded_store_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    trained(3).save(tmp_path / "all")
    again = LocalStore("device")
    again.init("w", full(0))
    again.load(tmp_path / "all")
    again.set_gradient_compression(TWO_BIT)
    assert values(again) == values(trained(3))
    assert again.pull(3).dtype == np.float16
    more(again, 2)
    assert values(again) == values(trained(5))
    assert again.stats()["keys"]["w"]["pushes"] == 5


def test_residuals_of_each_position_are_kept(tmp_path: Path) -> None:
    kv = LocalStore("device")
    kv.set_gradient_compression(TWO_BIT)
    kv.init(["v", "w"], [full(0), full(0)])
    kv.push("w", [full(0.25), full(0.5), full(0.125)])
    kv.save(tmp_path / "all")
    again = LocalStore("device")
    again.load(tmp_path / "all")
    again.clear_gradient_compression(flush=True)
    assert [again.pushpull("w", [full(0)] * 3)[0] for _ in range(2)] == [0.375, 0]
    assert "v" not in read_checkpoint(tmp_path / "all").residuals


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
def test_every_type_and_shape_comes_back(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    kv = LocalStore("local")
    kv.init("w", np.ones(shape, DTYPES[name]))
    kv.save(tmp_path / "all")
    again = LocalStore("local")
    again.load(tmp_path / "all")
    pulled = again.pull("w")
    assert (pulled.shape, pulled.dtype.name) == (shape, name)
    assert pulled.tobytes() == np.ones(shape, DTYPES[name]).tobytes()


@pytest.mark.parametrize("dump_optimizer", [False, True])
def test_optimizer_states_alone(tmp_path: Path, dump_optimizer: bool) -> None:
    trained(3).save_optimizer_states(tmp_path / "states", dump_optimizer)
    again = trained(0)
    again.broadcast({"w": trained(3).pull("w"), 3: trained(3).pull(3)})
    again.set_gradient_compression(TWO_BIT)
    if dump_optimizer:
        again.set_updater(None)
    again.load_optimizer_states(tmp_path / "states")
    assert again._keys["w"].step == 3
    state, expected = again._keys["w"].state, trained(3)._keys["w"].state
    assert state is not None and expected is not None
    assert {name: array.tolist() for name, array in state.items()} == {k: v.tolist() for k, v in expected.items()}
    assert again._optimizer is not None
    assert again._optimizer[0].params["learning_rate"] == 0.1


def test_files_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    trained(3).save(tmp_path / "all")
    trained(3).save_optimizer_states(tmp_path / "states")
    damaged = bytearray((tmp_path / "all").read_bytes())
    damaged[-5] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    (tmp_path / "foreign").write_bytes(b"cos\nsystem\n(S'touch marker'\ntR.")
    checkpoint = read_checkpoint(tmp_path / "all")
    checkpoint.optimizer = {"name": "nobodys", "params": {}}
    write_checkpoint(tmp_path / "unknown", checkpoint)
    checkpoint = read_checkpoint(tmp_path / "all")
    checkpoint.residuals["w"][0] = np.nan
    write_checkpoint(tmp_path / "poisoned", checkpoint)
    checkpoint = read_checkpoint(tmp_path / "all")
    checkpoint.masters["w"] = full(1)  # float32 keys have none
    write_checkpoint(tmp_path / "confused", checkpoint)
    checkpoint = read_checkpoint(tmp_path / "all")
    del checkpoint.state["w"]["mean"]
    write_checkpoint(tmp_path / "partial", checkpoint)

    kv = trained(1)
    before = values(kv)
    for name in ("damaged", "foreign", "unknown", "poisoned", "confused", "partial", "missing"):
        with pytest.raises(CheckpointError, match=name) as caught:
            kv.load(tmp_path / name)
        assert caught.value.path == str(tmp_path / name)
    kv.set_optimizer("sgd")
    with pytest.raises(CheckpointError, match=r"'adam'.*'sgd'"):
        kv.load_optimizer_states(tmp_path / "states")
    assert values(kv) == before


def test_warm_up_is_not_repeated_after_a_load(tmp_path: Path) -> None:
    sent = []
    kv = LocalStore("device")
    kv.init("w", full(0))
    kv.set_gradient_compression({**TWO_BIT, "warmup_rounds": 2})
    for _ in range(2):
        kv.push("w", full(1))
    sent.append(kv.stats()["keys"]["w"]["sent_bytes"])
    kv.save(tmp_path / "all")
    again = LocalStore("device")
    again.load(tmp_path / "all")
    again.set_gradient_compression({**TWO_BIT, "warmup_rounds": 2})
    again.push("w", full(1))
    sent.append(again.stats()["keys"]["w"]["sent_bytes"])
    assert sent == [2 * 256, 16]
    assert read_checkpoint(tmp_path / "all").rounds == {"w": 2}


def test_steps_without_state_arrays_are_kept(tmp_path: Path) -> None:
    kv = LocalStore("local")
    kv.init("w", full(1))
    kv.set_optimizer("sgd", learning_rate=0.1)  # no momentum: nothing but the step is kept
    kv.push("w", full(1))
    kv.save(tmp_path / "all")
    again = LocalStore("local")
    again.load(tmp_path / "all")
    assert again._keys["w"].step == 1


def test_a_key_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    trained(1).save(tmp_path / "all")
    kv = trained(1)
    kv.init("more", full(0))
    kv.push("w", full(1))
    before = values(kv)
    with pytest.raises(CheckpointError, match="'more' is not in the file"):
        kv.load(tmp_path / "all")
    assert values(kv) == before


def test_files_without_optimizer_hold_no_optimizer_states(tmp_path: Path) -> None:
    kv = LocalStore("local")
    kv.init("w", full(1))
    kv.save(tmp_path / "all")
    kv.set_optimizer("adam")
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        kv.load_optimizer_states(tmp_path / "all")


def test_keys_that_differ_or_are_missing_are_named(tmp_path: Path) -> None:
    trained(1).save(tmp_path / "all")
    trained(1).save_optimizer_states(tmp_path / "states")
    kv = LocalStore("device")
    kv.init("w", full(0, 65))
    with pytest.raises(CheckpointError, match=r"'w'.*\(64,\).*\(65,\)"):
        kv.load(tmp_path / "all")
    with pytest.raises(ConfigError, match="set_optimizer"):
        kv.load_optimizer_states(tmp_path / "states")
    kv.set_optimizer("adam", **ADAM)
    with pytest.raises(CheckpointError, match="'w' does not fit"):
        kv.load_optimizer_states(tmp_path / "states")
    with pytest.raises(CheckpointError, match="init it first"):
        other = LocalStore("local")
        other.set_optimizer("adam", **ADAM)
        other.load_optimizer_states(tmp_path / "states")
