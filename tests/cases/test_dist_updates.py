"""What users of other stores ran into, over real processes: own optimizers, asynchronous training."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

import kvstore

if TYPE_CHECKING:  # of the prelude that every worker's script begins with
    caught: Any = None
    tell: Any = None
    wait_for: Any = None

ENV = {"KVSTORE_CHUNK_ELEMENTS": "64"}

# --- R28: user-defined optimizer unknown to the server ------------------------------------------------------------

OWN_RULE = """
import numpy as np
from kvstore.optimizer import Optimizer, register_optimizer

@register_optimizer("halving")
class Halving(Optimizer):
    def create_state(self, n, dtype):
        return {"count": np.zeros(n, dtype)}

    def update(self, key, shape, offset, value, grad, state, step):
        assert shape == (10, 30), shape
        if grad.max() > 100:
            raise ValueError("gradient 101 is too steep")
        state["count"] += 1
        return value - grad / 2 - self.learning_rate(key, step) * state["count"]
"""


def use_own_rules() -> Any:
    import own_rule  # type: ignore[import-not-found]  # noqa: F401

    from kvstore.optimizer import Optimizer, register_optimizer

    @register_optimizer("script_only")
    class ScriptOnly(Optimizer[Any]):
        def create_state(self, n: int, dtype: Any) -> Any:
            return {}

        def update(self, *arguments: Any) -> Any:
            return arguments[3]

    with kvstore.create("dist_sync") as kv:
        began = time.monotonic()
        unknown = caught(kv.set_optimizer, "script_only")
        took = time.monotonic() - began
        kv.set_optimizer("halving", learning_rate=1.0)
        kv.init("w", np.zeros((10, 30), np.float32))
        ones = np.ones((10, 30), np.float32)
        values = [float(value.min()) for value in (kv.pushpull("w", ones), kv.pushpull("w", ones))]
        steep = caught(kv.pushpull, "w", ones * 101)
        after = kv.pushpull("w", ones)
        assert after.min() == after.max()
        return [unknown, took, values, steep, float(after.min())]


def test_r28_own_optimizers_run_on_the_servers_or_tell_what_to_do(run_job: Any) -> None:
    result = run_job(use_own_rules, workers=2, servers=2, env=ENV, modules={"own_rule": OWN_RULE})
    for unknown, took, values, steep, after in result.ok():
        name, text, _ = unknown
        assert name == "UnknownNameError" and took < 20, "the error has to come at once, not after the timeout"
        for part in ("'script_only'", "register_optimizer", "--import"):
            assert part in text
        assert values == [-2.0, -5.0]  # sum 2, halved, less 1 and then 2
        assert steep[0] == "ServerError" and steep[2]["key"] == "w"
        assert "ValueError: gradient 101 is too steep" in steep[1] and "'w'" in steep[1]
        assert after == -9.0, "the failed update left value and state as they were"


# --- R29: asynchronous mode without optimizer; its first values ---------------------------------------------------


def train_asynchronously() -> Any:
    kv = kvstore.create("dist_async")
    if kv.rank:
        wait_for(f"started{kv.rank - 1}")  # so the workers come one after the other, however slow the machine
    first = np.arange(200, dtype=np.float32)
    kv.init("w", first if kv.rank == 0 else np.zeros_like(first))
    pulled = kv.pull("w")
    without = [caught(kv.push, "w", first), caught(kv.pushpull, "w", first)]
    unchanged = bool((kv.pull("w") == pulled).all())
    tell(f"started{kv.rank}")
    for rank in range(kv.num_workers):
        wait_for(f"started{rank}")
    kv.set_optimizer("sgd", learning_rate=0.5)
    for _ in range(100):
        kv.push("w", np.full(200, 4, np.float32))
    own = kv.pull("w")
    kv.barrier()
    last = kv.pull("w")
    kv.close()
    return {
        "initial": bool((pulled == first).all()), "without": without, "unchanged": unchanged,
        "own": float((first - own).min()), "exact": bool((last == first - 0.5 * 4 * 300).all()),
    }  # fmt: skip


def test_r29_asynchronous_training_needs_an_optimizer_and_counts_every_push(run_job: Any) -> None:
    for found in run_job(train_asynchronously, workers=3, servers=2, env=ENV).ok():
        assert found["initial"], "the first pull gives rank 0's value"
        for name, text, _ in found["without"]:
            assert name == "ConfigError" and "set_optimizer" in text
        assert found["unchanged"] and found["exact"]
        assert found["own"] >= 0.5 * 4 * 100, "a pull contains all own pushes"
