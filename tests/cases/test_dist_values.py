"""What users of other stores ran into, over real processes: values, keys, layouts, sums."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvstore

if TYPE_CHECKING:  # of the prelude that every worker's script begins with
    from typing import Protocol

    class Caught(Protocol):
        def __call__(self, call: Any, *args: Any, **kwargs: Any) -> list[Any]: ...

    caught: Caught = None  # type: ignore[assignment]
    tell: Any = None
    wait_for: Any = None

LAYOUTS = ("transposed", "every second", "reversed", "fortran", "stride 0", "column")
SMALL_CHUNKS = {"KVSTORE_CHUNK_ELEMENTS": "64"}


def full(value: float, *shape: int) -> Any:
    return np.full(shape or (64,), value, np.float32)


def laid_out(name: str, seed: int) -> Any:
    """An array of shape (12, 20) in some layout; its elements are multiples of 0.5, so that sums are exact."""
    plain = np.random.default_rng(seed).integers(-8, 9, (12, 20)).astype(np.float32) * 0.5
    match name:
        case "transposed":
            return np.ascontiguousarray(plain.T).T
        case "every second":
            return np.repeat(plain, 2, axis=1)[:, ::2]
        case "reversed":
            return np.ascontiguousarray(plain[::-1, ::-1])[::-1, ::-1]
        case "fortran":
            return np.asfortranarray(plain)
        case "stride 0":
            return np.broadcast_to(plain[0], (12, 20))
        case "column":
            return np.repeat(plain[:, :, None], 3, axis=2)[:, :, 1]
        case _:
            raise ValueError(name)


# --- R01: pull overtakes rank 0's init ----------------------------------------------------------------------------


def early_pull() -> Any:
    with kvstore.create("dist_sync") as kv:
        many = list(range(50))
        if kv.rank == 0:
            wait_for("asking")
            time.sleep(0.5)  # the scenario: rank 0 is late
            kv.init("w", full(7))
            kv.init(many, [full(7 + key, 100) for key in many])
            kv.barrier()
            return {"early": kv.pull("w").tolist(), "many": [value.tolist() for value in kv.pull(many)]}
        unknown = caught(kv.pull, "never")
        tell("asking")
        kv.init("w", full(0))
        early = kv.pull("w").tolist()
        kv.init(many, [full(0, 100) for _ in many])
        pulled = [value.tolist() for value in kv.pull(many)]
        kv.barrier()
        ghost = caught(kv.init, "ghost", full(0))  # rank 0 never gives it a value
        after = kv.pull("w").tolist()
        return {"early": early, "many": pulled, "unknown": unknown, "ghost": ghost, "after": after}


def test_r01_a_pull_waits_for_rank_0s_value(run_job: Any) -> None:
    first, second = run_job(early_pull, uses=[full]).ok()
    for result in (first, second):
        assert result["early"] == [7.0] * 64
        assert result["many"] == [[7.0 + key] * 100 for key in range(50)]
    assert second["unknown"][0] == "KeyNotInitializedError" and second["unknown"][2]["key"] == "never"
    assert second["ghost"][0] == "PeerLeftError" and "'ghost'" in second["ghost"][1]
    assert second["ghost"][2] == {"role": "worker", "rank": 0}
    assert second["after"] == [7.0] * 64


# --- R04: integer keys wrap, and 3 versus '3' ---------------------------------------------------------------------


def many_kinds_of_keys() -> Any:
    with kvstore.create("dist_sync") as kv:
        kinds: list[int | str] = [
            2,
            2**32 + 2,
            2**40 + 2,
            -(2**63),
            2**63 - 1,
            3,
            "3",
            "",
            "ключ",
            "k" * 1000,
            "a/b",
            "\0",
        ]
        kv.init(kinds, [full(number) for number in range(len(kinds))])
        kv.push(kinds, [full(number) for number in range(len(kinds))])
        separately = [kv.pull(key)[0].item() for key in kinds]
        mixed = [value[0].item() for value in kv.pull(kinds)]
        wrong: list[Any] = [2**63, -(2**63) - 1, True, 1.5, None, b"x", "\ud800"]
        refused = [caught(kv.init, key, full(1)) for key in wrong]
        many = [f"many{number}" for number in range(5000)]  # more than one message may hold
        kv.init(many, [full(number, 1) for number in range(5000)])
        kv.push(many, [full(number, 1) for number in range(5000)])
        found = [value.item() for value in kv.pull(many)]
        kv.barrier()
        return {
            "separately": separately, "mixed": mixed, "refused": refused, "after": kv.pull(3)[0].item(),
            "many": found == [2.0 * number for number in range(5000)],
        }  # fmt: skip


def test_r04_keys_are_never_aliases(run_job: Any) -> None:
    for result in run_job(many_kinds_of_keys, workers=2, servers=1, uses=[full]).ok():
        assert result["separately"] == result["mixed"] == [2.0 * number for number in range(12)]
        assert [error[0] for error in result["refused"]] == ["ParameterError"] * 7
        assert result["after"] == 10.0 and result["many"]


# --- R05: no way to overwrite a value after init ------------------------------------------------------------------


def overwriting() -> Any:
    with kvstore.create("dist_sync") as kv:
        kv.init(["w", "residual", "state"], [full(1)] * 3)
        again = caught(kv.init, "w", full(2))
        kept = kv.pull("w")[0].item()
        kv.barrier()
        given = full(2 if kv.rank == 0 else 99)
        overwritten = kv.broadcast("w", given)[0].item()
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        kv.push("residual", full(0.25))
        kv.broadcast("residual", full(5))
        kv.push("residual", full(0.25))  # a residual that was kept would make it fire
        residual = kv.pull("residual")[0].item()
        kv.clear_gradient_compression()
        sizes = []
        for size in (500, 1, 500, 700, 64, 500):  # over several servers, on one, on several again
            kv.broadcast("size", full(3, size))
            kv.pushpull("size", full(1, size))
            sizes.append(kv.pushpull("size", full(size, size)).tolist())
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        kv.push("state", full(1))
        kv.broadcast("state", full(10))
        state = kv.pushpull("state", full(1))[0].item()
        shape = kv.broadcast("w", np.ones((3, 5), np.float64)).shape
        return {
            "again": again, "kept": kept, "overwritten": overwritten, "residual": residual, "state": state,
            "shape": shape, "sizes": sizes, "redefined": kv.pushpull("w", np.ones((3, 5), np.float64)).tolist(),
        }  # fmt: skip


def test_r05_broadcast_overwrites_and_starts_residuals_and_state_afresh(run_job: Any) -> None:
    for result in run_job(overwriting, servers=3, uses=[full], env=SMALL_CHUNKS).ok():
        assert result["again"][0] == "KeyExistsError" and result["again"][2]["key"] == "w"
        assert result["kept"] == 1.0 and result["overwritten"] == 2.0
        assert result["sizes"] == [[2.0 * size] * size for size in (500, 1, 500, 700, 64, 500)]
        assert result["residual"] == 0.0, "the residual of before the broadcast was sent"
        assert result["state"] == 10.0 - 2.0, "the momentum of before the broadcast was used"
        assert result["shape"] == [3, 5] and result["redefined"] == [[1.0 - 2.0] * 5] * 3


# --- R10: non-contiguous arrays -----------------------------------------------------------------------------------


def strided(layouts: list[str]) -> Any:
    wrong = []
    with kvstore.create("dist_sync") as kv:
        for compression in ("raw", "2bit"):
            if compression == "2bit":
                kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
            for layout in layouts:
                array = laid_out(layout, seed=kv.rank)
                one, other = f"{compression} {layout}", f"{compression} {layout}, contiguous"
                kv.init([one, other], [laid_out(layout, 7), np.ascontiguousarray(laid_out(layout, 7))])
                if not np.array_equal(kv.pull(one), laid_out(layout, 7)):
                    wrong.append(f"{one}: init")
                kv.push([one, other], [array, np.ascontiguousarray(array)])
                around = np.full((26, 45), -9.0, np.float32)
                out = around[1:25:2, 1:41:2]
                kv.pull(one, out)
                if not np.array_equal(out, kv.pull(other)) or not out.any():
                    wrong.append(f"{one}: {out} instead of {kv.pull(other)}")
                out[...] = -9.0
                if (around != -9.0).any():
                    wrong.append(f"{one}: elements around `out` were written")
    return wrong


def test_r10_any_layout_gives_what_the_contiguous_copy_gives(run_job: Any) -> None:
    for wrong in run_job(strided, args={"layouts": LAYOUTS}, uses=[laid_out], env=SMALL_CHUNKS).ok():
        assert wrong == []


def channels_last() -> Any:
    torch = __import__("torch")
    with kvstore.create("dist_sync") as kv:
        plain = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
        last = plain.to(memory_format=torch.channels_last)
        out = torch.zeros((2, 3, 4, 5)).to(memory_format=torch.channels_last)
        kv.init("w", last)
        kv.pushpull("w", last, out)
        strides_kept = out.is_contiguous(memory_format=torch.channels_last)
        return bool(torch.equal(out, plain * kv.num_workers)), strides_kept, bool(torch.equal(kv.pull("w"), out))


def test_r10_torch_channels_last(run_job: Any) -> None:
    pytest.importorskip("torch")
    assert run_job(channels_last, workers=1, servers=1).ok() == [[True, True, True]]


# --- R11: zero-size and 0-d arrays --------------------------------------------------------------------------------


def edge_shapes() -> Any:
    from kvstore.compression.registry import known_names

    wrong = []
    with kvstore.create("dist_sync") as kv:
        for codec in ("raw", *sorted(set(known_names()) - {"none"})):
            if codec != "raw":
                kv.set_gradient_compression({"type": codec, "momentum": 0})
            for dtype in ("float32", "float16", "int64"):
                shapes: list[tuple[int, ...]] = [(), (0,), (3, 0), (1,)]
                keys = [f"{codec} {dtype} {shape}" for shape in shapes]
                arrays = [np.full(shape, 1.25 if dtype != "int64" else 2, dtype) for shape in shapes]
                kv.init(keys, arrays)
                for times in (1, 2):
                    pulled = kv.pushpull(keys, arrays)
                    for key, array, value in zip(keys, arrays, pulled, strict=True):
                        if (value.shape, value.dtype) != (array.shape, array.dtype):
                            wrong.append(f"{key}, round {times}: {value.shape} {value.dtype}")
                        if array.size and value.reshape(-1)[0] != array.reshape(-1)[0] * kv.num_workers:
                            wrong.append(f"{key}, round {times}: {value}")
    return wrong


@pytest.mark.parametrize("servers", [1, 3])
def test_r11_edge_shapes_keep_shape_and_type_and_sum_exactly(run_job: Any, servers: int) -> None:
    for wrong in run_job(edge_shapes, workers=2, servers=servers).ok():
        assert wrong == []


# --- R12: sum or mean? --------------------------------------------------------------------------------------------


def sums_and_steps(average: bool) -> Any:
    with kvstore.create("dist_sync", average=average) as kv:
        kv.init(["plain", "devices"], [full(0)] * 2)
        kv.push(["plain", "devices"], [full(1), [full(1), full(1)]])
        found = {"plain": kv.pull("plain").tolist(), "devices": kv.pull("devices").tolist()}
        # Linear regression on 12 samples, an equal part of them on each worker.
        rng = np.random.default_rng(3)
        inputs, target = rng.standard_normal((12, 5)).astype(np.float32), rng.standard_normal(12).astype(np.float32)
        own = slice(kv.rank * 12 // kv.num_workers, (kv.rank + 1) * 12 // kv.num_workers)
        kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9, rescale_grad=1.0 if average else 1 / kv.num_workers)
        weights = np.zeros(5, np.float32)
        kv.init("weights", weights)
        for _ in range(5):
            error = inputs[own] @ weights - target[own]
            weights = kv.pushpull("weights", inputs[own].T @ error / len(error))
        return {**found, "weights": weights.tolist()}


@pytest.mark.parametrize(("workers", "average"), [(1, False), (3, False), (3, True)])
def test_r12_pushes_are_added_unless_the_mean_is_asked_for(run_job: Any, workers: int, average: bool) -> None:
    rng = np.random.default_rng(3)
    inputs, target = rng.standard_normal((12, 5)).astype(np.float32), rng.standard_normal(12).astype(np.float32)
    expected, velocity = np.zeros(5), np.zeros(5)
    for _ in range(5):
        velocity = 0.9 * velocity - 0.1 * inputs.T @ (inputs @ expected - target) / 12
        expected = expected + velocity
    for result in run_job(sums_and_steps, workers=workers, servers=1, args={"average": average}, uses=[full]).ok():
        assert result["plain"] == [1.0 if average else float(workers)] * 64
        assert result["devices"] == [2.0 if average else 2.0 * workers] * 64
        np.testing.assert_allclose(result["weights"], expected, atol=1e-6, err_msg="one worker with the whole batch")
