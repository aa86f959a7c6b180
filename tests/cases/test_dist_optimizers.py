"""What users of other stores ran into, over real processes: optimizers on several servers, and their saved state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import kvstore

if TYPE_CHECKING:  # of the prelude that every worker's script begins with
    from typing import Protocol

    class Caught(Protocol):
        def __call__(self, call: Any, *args: Any, **kwargs: Any) -> list[Any]: ...

    caught: Caught = None  # type: ignore[assignment]
    FOLDER: Path = Path()

SMALL_CHUNKS = {"KVSTORE_CHUNK_ELEMENTS": "64"}

OWN_RULES = {
    "own_rules": """
import numpy as np
from kvstore.optimizer import Optimizer, OptimizerParams, register_optimizer

@register_optimizer("shape_teller")
class ShapeTeller(Optimizer[OptimizerParams]):
    def create_state(self, n, dtype):
        return {}
    def update(self, key, shape, offset, value, grad, state, step):
        return np.resize(np.array([*shape, offset, value.size], value.dtype), value.size)

@register_optimizer("by_norm")
class ByNorm(Optimizer[OptimizerParams]):
    whole = True
    def create_state(self, n, dtype):
        return {"momentum": np.zeros(n, dtype)}
    def update(self, key, shape, offset, value, grad, state, step):
        state["momentum"] += grad
        rate = self.learning_rate(key, step) * np.linalg.norm(value) / np.linalg.norm(grad)
        return value - value.dtype.type(rate) * state["momentum"]
"""
}


def values(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- R06: shapes, and rules that see the whole array --------------------------------------------------------------


def shapes_and_rules() -> Any:
    import own_rules  # type: ignore[import-not-found]  # noqa: F401  # registers the rules

    rules: dict[str, dict[str, Any]] = {
        "by_norm": {"learning_rate": 0.1},
        "sgd": {"learning_rate": 0.1, "wd": 0.01},
        "momentum": {"learning_rate": 0.1, "momentum": 0.9},
        "adam": {"learning_rate": 0.1},
    }
    with kvstore.create("dist_sync") as kv:
        found: dict[str, Any] = {}
        for name, params in rules.items():
            kv.set_optimizer("sgd" if name == "momentum" else name, **params)
            kv.init(name, values(3, 1000))
            steps = [kv.pushpull(name, values(10 * step + kv.rank, 1000)).tolist() for step in range(3)]
            found[name] = steps[-1]
        found["refused"] = caught(kv.set_optimizer, "by_norm")
        kv.set_optimizer("shape_teller")
        kv.init(["small", "cut"], [values(1, 4, 2), values(1, 20, 10)])
        told = kv.pushpull(["small", "cut"], [values(2, 4, 2), values(2, 20, 10)])
        found["small"], found["cut"] = (value.reshape(-1).tolist() for value in told)
        return found


def by_norm_of_one_array() -> Any:
    """The rule `by_norm`, on arrays that nobody cut."""
    value, momentum = values(3, 1000), np.zeros(1000, np.float32)
    for step in range(3):
        gradient = values(10 * step, 1000) + values(10 * step + 1, 1000)
        momentum += gradient
        value = value - np.float32(0.1 * np.linalg.norm(value) / np.linalg.norm(gradient)) * momentum
    return value


def test_r06_any_number_of_servers_gives_what_one_gives(run_job: Any) -> None:
    one, three = (
        run_job(shapes_and_rules, servers=servers, uses=[values], modules=OWN_RULES, env=SMALL_CHUNKS).ok()
        for servers in (1, 3)
    )
    for rank in (0, 1):
        assert one[rank]["small"] == three[rank]["small"] == [4, 2, 0, 8] * 2
        assert [one[rank]["cut"][start : start + 4] for start in (0, 64, 128, 192)] == [
            [20, 10, 0, 64], [20, 10, 64, 64], [20, 10, 128, 64], [20, 10, 192, 8]
        ]  # fmt: skip
        for rule in ("cut", "sgd", "momentum", "adam", "by_norm"):
            assert three[rank][rule] == one[0][rule], f"{rule} differs between 1 and 3 servers"
        np.testing.assert_allclose(three[rank]["by_norm"], by_norm_of_one_array(), rtol=1e-5, atol=1e-6)
        refused = three[rank]["refused"]
        assert refused[0] == "ConfigError" and "by_norm" in refused[1] and "before init" in refused[1]


# --- R27: saved state ---------------------------------------------------------------------------------------------

RULES = {
    "momentum": {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9},
    "adam": {"optimizer": "adam", "learning_rate": 0.1},
}


def training(folder: str, rules: dict[str, dict[str, Any]]) -> Any:
    """Four steps with each rule; everything is saved after the third."""
    found: dict[str, Any] = {}
    with kvstore.create("dist_sync") as kv:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5}, {"w": {"type": "none"}})
        kv.init(["w", "compressed"], [values(1, 500), values(2, 500)])
        for name, params in rules.items():
            kv.broadcast(["w", "compressed"], [values(1, 500), values(2, 500)])
            kv.set_optimizer(**params)
            for step in range(4):
                gradients = [values(100 + 10 * step + kv.rank, 500), values(200 + 10 * step + kv.rank, 500)]
                after = [value.tolist() for value in kv.pushpull(["w", "compressed"], gradients)]
                if step == 2:
                    found[f"{name} 3"] = after
                    kv.save_optimizer_states(f"{folder}/{name}.states")
                    kv.save_optimizer_states(f"{folder}/{name}.full", dump_optimizer=True)
                    kv.save(f"{folder}/{name}.all")
                    kv.barrier()
            found[f"{name} 4"] = after
        return found


def resumed(folder: str, rules: dict[str, dict[str, Any]], third: dict[str, Any], names: list[str]) -> Any:
    """One more step from each of the saved files, in a job of its own."""
    found: dict[str, Any] = {}
    with kvstore.create("dist_sync") as kv:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5}, {"w": {"type": "none"}})
        kv.init(["w", "compressed"], [np.zeros(500, np.float32)] * 2)
        gradients = [values(130 + kv.rank, 500), values(230 + kv.rank, 500)]
        for name in names:
            start = [np.array(value, np.float32) for value in third[name]]
            for kind in ("states", "full", "all"):
                kv.broadcast(["w", "compressed"], start if kind != "all" else [values(9, 500), values(9, 500)])
                if kind == "states":
                    kv.set_optimizer(**rules[name])
                else:
                    kv.set_optimizer("sgd", learning_rate=77)  # the file knows better
                load = kv.load if kind == "all" else kv.load_optimizer_states
                load(f"{folder}/{name}.{kind}")
                found[f"{name} {kind}"] = [value.tolist() for value in kv.pushpull(["w", "compressed"], gradients)]
        return found


def test_r27_three_steps_saved_and_one_more_are_four(run_job: Any, tmp_path: Path) -> None:
    saved = run_job(training, args={"folder": str(tmp_path), "rules": RULES}, uses=[values], env=SMALL_CHUNKS).ok()
    third = {name: saved[0][f"{name} 3"] for name in RULES}
    args = {"folder": str(tmp_path), "rules": RULES, "third": third, "names": list(RULES)}
    for servers in (2, 3):
        for result in run_job(resumed, servers=servers, args=args, uses=[values], env=SMALL_CHUNKS).ok():
            for name in RULES:
                expected = saved[0][f"{name} 4"]
                for kind in ("states", "full"):
                    assert result[f"{name} {kind}"][0] == expected[0], f"{name}.{kind} on {servers} servers"
                assert result[f"{name} all"] == expected, f"{name}.all, with residuals, on {servers} servers"


def damaged(folder: str) -> Any:
    found: dict[str, Any] = {}
    with kvstore.create("dist_sync") as kv:
        kv.init(["w", "compressed"], [values(1, 500), values(2, 500)])
        kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
        kv.save_optimizer_states(f"{folder}/unused.states")
        kv.pushpull("w", values(3, 500))
        before = kv.pushpull("w", values(4, 500))
        for name in ("cut", "flipped", "foreign", "pickled", "missing", "adam.states", "other.all"):
            for call in (kv.load, kv.load_optimizer_states):
                found[f"{name} {call.__name__}"] = caught(call, f"{folder}/{name}")
        found["values kept"] = bool(np.array_equal(kv.pull("w"), before))
        after = kv.pushpull("w", values(5, 500))
        velocity = np.zeros(500, np.float32)
        expected = values(1, 500)
        for seed in (3, 4, 5):
            velocity = velocity * np.float32(0.9) - np.float32(0.1) * 2 * values(seed, 500)
            expected = expected + velocity
        found["error"] = float(np.abs(after - expected).max())
        kv.load_optimizer_states(f"{folder}/unused.states")  # of an optimizer without momentum yet
        restarted = kv.pushpull("w", values(6, 500))
        found["restarted"] = float(np.abs(restarted - (after - np.float32(0.1) * 2 * values(6, 500))).max())
        return found


def other_keys(folder: str) -> Any:
    with kvstore.create("dist_sync") as kv:
        kv.init("another", values(1, 500))
        kv.set_optimizer("adam")
        kv.pushpull("another", values(1, 500))
        kv.save(f"{folder}/other.all")
        kv.broadcast(["w", "compressed"], [values(1, 500), values(2, 500)])
        kv.pushpull(["w", "compressed"], [values(1, 500), values(2, 500)])
        kv.save_optimizer_states(f"{folder}/adam.states")
        return (FOLDER / "worker.py").exists()


def test_r27_damaged_and_foreign_files_change_nothing(run_job: Any, tmp_path: Path) -> None:
    assert run_job(other_keys, args={"folder": str(tmp_path)}, uses=[values], env=SMALL_CHUNKS).ok() == [True, True]
    good = (tmp_path / "other.all").read_bytes()
    (tmp_path / "cut").write_bytes(good[:-100])
    (tmp_path / "flipped").write_bytes(good[:-1000] + bytes([good[-1000] ^ 1]) + good[-999:])
    (tmp_path / "foreign").write_bytes(b"PK\3\4" + bytes(1000))
    mark = tmp_path / "code ran"
    (tmp_path / "pickled").write_bytes(f"cpathlib\nPath.touch\n(cpathlib\nPath\n(S'{mark}'\ntRtR.".encode())
    results = run_job(damaged, args={"folder": str(tmp_path)}, uses=[values], env=SMALL_CHUNKS).ok()
    assert not mark.exists()
    for rank, result in enumerate(results):
        assert result.pop("values kept") and result.pop("error") < 1e-5
        assert result.pop("restarted") < 1e-5, "momentum of before the load was used"
        for what, error in result.items():
            assert error is not None, f"{what} was taken up"
            assert rank != 0 or error[0] == "CheckpointError", f"{what}: {error}"
            assert what.split()[0] in error[1], f"{what}: {error}"
