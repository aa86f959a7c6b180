"""What users of other stores ran into, over real processes: gradient compression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import kvstore

if TYPE_CHECKING:  # of the prelude that every worker's script begins with
    from typing import Protocol

    class Caught(Protocol):
        def __call__(self, call: Any, *args: Any, **kwargs: Any) -> list[Any]: ...

    caught: Caught = None  # type: ignore[assignment]

TWO_BIT = {"type": "2bit", "threshold": "0.5"}
AS_CHOSEN = {"KVSTORE_KERNELS": "auto"}
SMALL_CHUNKS = {"KVSTORE_CHUNK_ELEMENTS": "64"}
CHUNKS = {"KVSTORE_CHUNK_ELEMENTS": "16384"}


def full(value: float, *shape: int) -> Any:
    return np.full(shape or (64,), value, np.float32)


def decoded(kv: Any, key: str, values: list[float]) -> list[Any]:
    """What the servers hold after each push of an array full of the next value; None where its elements differ."""
    found = []
    for value in values:
        pulled = kv.pushpull(key, full(value, 100))
        found.append(pulled[0].item() if (pulled == pulled[0]).all() else None)
    return found


# --- R15: the exact rule ------------------------------------------------------------------------------------------


def exact_rule() -> Any:
    with kvstore.create("dist_sync") as kv:
        kv.set_gradient_compression({"type": "2bit", "threshold": "0.5"})
        kv.init(["a", "b", "c", "d", "e"], [full(0, 100)] * 5)
        kv.init("large", full(0, 1_000_000))
        found = {
            "quarters": decoded(kv, "a", [0.25, 0.25, 0.25]),
            "much": decoded(kv, "b", [2.25, 0, 0, 0, 0, 0]),
            "exactly": decoded(kv, "c", [0.5, -0.5, 0.4999]),
        }
        kv.push("large", full(0.75, 1_000_000))
        kv.barrier()
        counted = kv.stats()["keys"]["large"]
        kv.set_optimizer("test", rescale_grad=0.1)
        kv.pushpull("d", full(0.5, 100))
        return {**found, "ratio": counted["raw_bytes"] / counted["sent_bytes"], "stored": kv.pull("d")[0].item()}


def test_r15_each_element_sends_a_threshold_or_nothing_and_keeps_the_rest(run_job: Any) -> None:
    (result,) = run_job(exact_rule, workers=1, servers=2, uses=[full, decoded], env={**CHUNKS, **AS_CHOSEN}).ok()
    assert result["quarters"] == [0.0, 0.5, 0.0]
    assert result["much"] == [0.5, 0.5, 0.5, 0.5, 0.0, 0.0]
    assert result["exactly"] == [0.5, -0.5, 0.0]
    assert result["ratio"] >= 14
    assert result["stored"] == float(np.float32(0.1) * np.float32(0.5)), "values themselves are not quantised"


def added_codes() -> Any:
    with kvstore.create("dist_sync") as kv:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        kv.init(["a", "b", "c"], [full(0, 100)] * 3)
        ramp = (np.arange(100, dtype=np.float32) - 50) / 25
        kv.push("b", ramp * (1 if kv.rank == 0 else -2))
        return [
            decoded(kv, "a", [0.25, 0.25, 0.25] if kv.rank == 0 else [-2.25, 0, 0]),
            decoded(kv, "c", [0.75, 0.75] if kv.rank == 0 else [0.5, 0.5]),
            kv.pull("b").tolist(),
        ]


def test_r15_codes_of_two_workers_are_added(run_job: Any) -> None:
    ramp = (np.arange(100, dtype=np.float32) - 50) / 25
    signs = [np.where(one >= 0.5, 0.5, np.where(one <= -0.5, -0.5, 0)) for one in (ramp, -2 * ramp)]
    for result in run_job(added_codes, uses=[full, decoded], env=SMALL_CHUNKS).ok():
        assert result == [[-0.5, 0.0, -0.5], [1.0, 1.0], (signs[0] + signs[1]).tolist()]


# --- R16: when it may be set, and what it refuses -----------------------------------------------------------------


def settings() -> Any:
    with kvstore.create("dist_sync") as kv:
        found: dict[str, Any] = {"refused": []}
        kv.init(["w", "v"], [full(0, 100)] * 2)
        wrong: list[dict[str, Any]] = [
            {"type": "3bit"}, {"threshold": 0.5}, {"type": "2bit", "threshold": 0}, {"type": "2bit", "threshold": -1},
            {"type": "2bit", "threshold": "abc"}, {"type": "2bit", "threshold": float("nan")},
            {"type": "2bit", "threshold": "inf"}, {"type": "2bit", "treshold": 1}, {"type": "none"},
        ]  # fmt: skip
        for params in wrong:
            found["refused"].append(caught(kv.set_gradient_compression, params))
        found["raw"] = decoded(kv, "w", [0.75, 0.25])
        kv.set_gradient_compression({"type": "2bit", "threshold": "0.5" if kv.rank else 0.5})  # equal settings
        found["compressed"] = decoded(kv, "w", [0.75, 0.25])
        kv.set_gradient_compression({"type": "2bit", "threshold": 2.0})
        found["other threshold"] = decoded(kv, "w", [1.0, 1.0])
        kv.clear_gradient_compression()
        found["flushed"] = decoded(kv, "w", [0.25, 0.25])
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        kv.pushpull("w", full(0.75, 100))
        kv.clear_gradient_compression(flush=False)
        found["dropped"] = decoded(kv, "w", [0.25])
        return found


def test_r16_set_late_set_again_and_cleared(run_job: Any) -> None:
    named = ["3bit", "type", "threshold", "threshold", "abc", "threshold", "threshold", "treshold", "clear_gradient"]
    for result in run_job(settings, uses=[full, decoded], env=SMALL_CHUNKS).ok():
        for error, name in zip(result["refused"], named, strict=True):
            assert error[0] in ("ParameterError", "UnknownNameError") and name in error[1], error
        assert result["raw"] == [1.5, 0.5], "a refused setting was taken up"
        assert result["compressed"] == [1.0, 1.0]  # residuals 0.25, then 0
        assert result["other threshold"] == [0.0, 4.0]
        assert result["flushed"] == [0.5, 0.5]
        assert result["dropped"] == [0.5], "0.25 of before was to be dropped"


def different_settings() -> Any:
    with kvstore.create("dist_sync") as kv:
        kv.init("w", full(0, 100))
        found: dict[str, Any] = {"first": decoded(kv, "w", [0.75])}
        found["differ"] = caught(kv.set_gradient_compression, {"type": "2bit", "threshold": 0.5 + kv.rank})
        found["per key"] = caught(
            kv.set_gradient_compression, {"type": "2bit"}, {"*.bias": {"type": "none"}} if kv.rank else None
        )
        found["only one"] = caught(kv.clear_gradient_compression) if kv.rank else None
        if not kv.rank:
            found["only one"] = caught(kv.set_gradient_compression, {"type": "2bit"})
        found["still raw"] = decoded(kv, "w", [0.75])
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        found["agreed"] = decoded(kv, "w", [0.75])
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.25})
        found["agreed again"] = decoded(kv, "w", [0.0])
        return found


def test_r16_ranks_that_differ_are_told_on_every_rank(run_job: Any) -> None:
    for result in run_job(different_settings, uses=[full, decoded], env=SMALL_CHUNKS).ok():
        assert result["differ"][0] == result["per key"][0] == result["only one"][0] == "MismatchError"
        assert "1.5" in result["differ"][1] and "*.bias" in result["per key"][1]
        assert result["first"] == result["still raw"] == [1.5]
        assert result["agreed"] == [1.0]
        assert result["agreed again"] == [0.5]  # the residual of 0.25 on each worker


# --- R17: half precision ------------------------------------------------------------------------------------------


def half_precision(dtypes: list[str]) -> Any:
    import ml_dtypes

    wrong = []
    with kvstore.create("dist_sync") as kv:
        kv.set_gradient_compression({"type": "2bit", "threshold": "0.5"})
        rng = np.random.default_rng(17 + kv.rank)
        for name in dtypes:
            dtype = np.dtype(getattr(ml_dtypes, name, name))
            kv.init([name, f"{name} as float32"], [np.zeros(100_000, dtype), np.zeros(100_000, np.float32)])
            for step in range(3):
                gradient = rng.standard_normal(100_000).astype(dtype)
                got, wide = kv.pushpull([name, f"{name} as float32"], [gradient, gradient.astype(np.float32)])
                if got.dtype != dtype:
                    wrong.append(f"{name}: pulled as {got.dtype}")
                if not np.array_equal(got, wide.astype(dtype)) or not got[65_536:].any():
                    wrong.append(f"{name}, step {step}: {int((got != wide.astype(dtype)).sum())} elements differ")
            sent = kv.stats()["keys"][name]
            if sent["sent_bytes"] * 7.9 > sent["raw_bytes"]:
                wrong.append(f"{name}: {sent['sent_bytes']} of {sent['raw_bytes']} bytes")
    return wrong


def test_r17_half_precision_is_compressed_as_float32_is(run_job: Any) -> None:
    for wrong in run_job(half_precision, env=AS_CHOSEN, args={"dtypes": ["float16", "bfloat16"]}).ok():
        assert wrong == []


# --- R21: one NaN -------------------------------------------------------------------------------------------------


def one_bad_batch(kv: Any, key: str, bad: float) -> Any:
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.init([key, f"other than {key}"], [full(0, 200)] * 2)
    other = f"other than {key}"
    good = full(0.5, 200)
    poisoned = good.copy()
    poisoned[137] = bad
    for _ in range(4):
        kv.pushpull([key, other], [good, good])
    found: dict[str, Any] = {}
    kv.push(other, good)
    if kv.rank == 1:
        found["error"] = caught(kv.push, key, poisoned)
        found["other"] = kv.pull(other).tolist()
        kv.barrier()
        kv.push(key, good)
        kv.barrier()
    else:
        kv.push(key, good)
        found["error"] = caught(kv.pull, key)
        found["other"] = kv.pull(other).tolist()
        kv.barrier()  # all have seen it
        kv.barrier()  # rank 1 has pushed again
    found["mended"] = kv.pull(key).tolist()
    found["next"] = kv.pushpull(key, full(0.25, 200)).tolist()
    # propagate: it is seen, and only where it was
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "on_nonfinite": "propagate"})
    seen = kv.pushpull(key, poisoned if kv.rank == 1 else good)
    found["seen"] = np.flatnonzero(~np.isfinite(seen)).tolist()
    found["after"] = bool(np.isfinite(kv.pushpull(key, good)).all())
    return found


def bad_batches() -> Any:
    with kvstore.create("dist_sync") as kv:
        return [one_bad_batch(kv, str(bad), bad) for bad in (float("nan"), float("inf"))]


def test_r21_a_nan_is_told_to_everybody_and_leaves_no_trace(run_job: Any) -> None:
    uses = [full, one_bad_batch]
    for rank, found in enumerate(run_job(bad_batches, workers=3, servers=2, uses=uses, env=SMALL_CHUNKS).ok()):
        for key, result in zip(("nan", "inf"), found, strict=True):
            name, text, facts = result["error"]
            assert (name, facts["key"], facts["rank"], facts["count"]) == ("NonFiniteError", key, 1, 1), f"rank {rank}"
            assert repr(key) in text and "rank 1" in text
            assert result["other"] == [1.5] * 200, "another key was affected"
            assert result["mended"] == [1.5] * 200, "the refused worker pushed again, and the round is complete"
            assert result["next"] == [0.0] * 200
            assert result["seen"] == [137]
            assert result["after"]


# --- R25: what should not be compressed ---------------------------------------------------------------------------


def a_model() -> Any:
    with kvstore.create("dist_sync") as kv:
        kv.set_gradient_compression(
            {"type": "2bit", "threshold": 0.5, "min_elements": 1000},
            {"head.*": {"type": "none"}, "tail": {"type": "2bit"}},
        )
        sizes = {"bias": 10, "matrix": 1_000_000, "head.weight": 5000, "tail": 20}
        kv.init({name: full(0, size) for name, size in sizes.items()})
        model = kv.pushpull(list(sizes), [full(0.125, size) for size in sizes.values()])
        # every size and type: never more than raw
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        many = {
            f"{dtype} {size}": np.ones(size, dtype) for dtype in ("float16", "float32") for size in range(1, 140, 3)
        }
        kv.init(many)
        kv.push(many)
        kv.barrier()
        counted = kv.stats()["keys"]
        return {
            "values": [value[0].item() for value in model],
            "sent": {name: counted[name]["sent_bytes"] for name in sizes},
            "more": [name for name in counted if counted[name]["sent_bytes"] > counted[name]["raw_bytes"]],
        }


def test_r25_small_and_named_keys_go_raw_and_none_takes_more_bytes_than_raw(run_job: Any) -> None:
    for result in run_job(a_model, uses=[full], env=CHUNKS).ok():
        assert result["values"] == [0.25, 0.0, 0.25, 0.0]
        assert result["sent"] == {"bias": 40, "matrix": 250_000, "head.weight": 20_000, "tail": 8}
        assert result["more"] == []
