"""PowerSGD: rank, sizes, warm start, what is no matrix, and hostile bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.compression.codec import Context, Payload
from kvstore.compression.encoder import KeyEncoder
from kvstore.compression.powersgd import PowerSgd, PowerSgdParams, matrix_of, orthonormal
from kvstore.errors import ParameterError, PayloadError

F4 = np.dtype(np.float32)


def encode(x: Any, rank: int = 2, state: Any = None) -> tuple[Payload, Any, Context]:
    ctx = Context("w", x.size, shape=x.shape)
    payload, state = PowerSgd(PowerSgdParams(rank=rank)).encode(x.reshape(-1), state, ctx)
    return payload, state, ctx


def decode(payload: Payload, ctx: Context) -> Any:
    out = np.zeros(ctx.n, np.float32)
    PowerSgd().decode_add(payload, out, ctx)
    return out.reshape(ctx.shape)


def test_a_matrix_of_the_rank_arrives_whole(rng: np.random.Generator) -> None:
    for rank in (1, 2, 4):
        x = (rng.standard_normal((30, rank)) @ rng.standard_normal((rank, 50))).astype(np.float32)
        payload, _, ctx = encode(x, rank)
        assert payload.nbytes == 4 * rank * (30 + 50)
        assert payload.meta == {"rows": 30, "columns": 50, "rank": rank, "scale": float(np.abs(x).max())}
        assert np.allclose(decode(payload, ctx), x, atol=1e-4 * np.abs(x).max())


def test_more_dimensions_are_rows_by_the_rest() -> None:
    assert matrix_of((8, 3, 5, 5)) == (8, 75)
    assert PowerSgd().encoded_bytes((8, 3, 5, 5)) == 4 * 2 * (8 + 75)
    assert PowerSgd().encoded_bytes((1, 50)) == 4 * (1 + 50)  # no rank above 1
    assert [PowerSgd().encoded_bytes(shape) for shape in ((), (9,), (0, 4), (4, 0))] == [None] * 4


def test_the_warm_start_comes_near_the_best_approximation(rng: np.random.Generator) -> None:
    u, _, v = np.linalg.svd(rng.standard_normal((40, 40)))
    spectrum = 0.8 ** np.arange(40)
    x = ((u * spectrum) @ v).astype(np.float32)
    best = float((spectrum[2:] ** 2).sum())
    errors, state = [], None
    for _ in range(20):
        payload, state, ctx = encode(x, 2, state)
        errors.append(float(((decode(payload, ctx) - x) ** 2).sum()))
    assert errors[0] > 1.1 * best
    assert errors[-1] == pytest.approx(best, rel=0.02)


def test_error_feedback_delivers_everything_in_time(rng: np.random.Generator) -> None:
    x = rng.standard_normal((24, 24)).astype(np.float32)
    encoder, total = KeyEncoder("w", 576, F4, shape=(24, 24)), np.zeros(576, np.float32)
    for round in range(1, 61):
        (chunk,) = encoder.encode(encoder.prepare(x, PowerSgdParams(), round))
        PowerSgd().decode_add(chunk.payload, total, Context("w", 576))
    kept = encoder.state()
    assert np.allclose(total + kept["residual"], 60 * x.reshape(-1), rtol=1e-3, atol=1e-3)
    assert np.linalg.norm(kept["residual"]) < 30 * np.linalg.norm(x)  # bounded, while 60 x were given
    assert kept["state/powersgd/0/q"].shape == (48,)


@pytest.mark.parametrize("shape", [(), (9,), (0, 3), (2, 2), (1, 7)])
def test_what_is_no_matrix_or_does_not_get_smaller_travels_raw_by_chunks(shape: tuple[int, ...]) -> None:
    n = int(np.prod(shape))
    encoder = KeyEncoder("w", n, F4, chunk_elements=64, shape=shape)
    prepared = encoder.prepare(np.ones(shape, np.float32), PowerSgdParams())
    assert [chunk.codec for chunk in encoder.encode(prepared)] == ["none"]
    assert prepared.parts == 1


def test_a_long_vector_travels_in_chunks() -> None:
    encoder = KeyEncoder("b", 200, F4, chunk_elements=64)
    prepared = encoder.prepare(np.ones(200, np.float32), PowerSgdParams())
    assert prepared.parts == len(list(encoder.encode(prepared))) == 4


def test_whole_keys_say_that_they_are_several_chunks() -> None:
    encoder = KeyEncoder("w", 400, F4, chunk_elements=64, shape=(20, 20))
    prepared = encoder.prepare(np.ones((20, 20), np.float32), PowerSgdParams())
    (chunk,) = encoder.encode(prepared)
    assert (chunk.codec, chunk.index, chunk.n, chunk.whole, prepared.whole_bytes) == ("powersgd", 0, 400, True, 320)


def test_nothing_gives_nothing_and_keeps_the_start(rng: np.random.Generator) -> None:
    x = rng.standard_normal((20, 20)).astype(np.float32)
    _, before, _ = encode(x)
    payload, after, ctx = encode(np.zeros((20, 20), np.float32), 2, {"q": before["q"].copy()})
    assert not decode(payload, ctx).any()
    assert after["q"].tobytes() == before["q"].tobytes()  # a round of zeros must not end the iteration
    payload, _, ctx = encode(x, 2, after)
    assert decode(payload, ctx).any()


def test_columns_become_orthonormal_or_zero(rng: np.random.Generator) -> None:
    p = rng.standard_normal((50, 4)).astype(np.float32)
    p[:, 2] = p[:, 0] - 2 * p[:, 1]
    q = orthonormal(p)
    assert not q[:, 2].any()
    kept = q[:, [0, 1, 3]].astype(np.float64)
    assert np.allclose(kept.T @ kept, np.eye(3), atol=1e-6)


def test_workers_start_alike_and_seeds_differ() -> None:
    x = np.arange(900, dtype=np.float32).reshape(30, 30) % 7
    ctxs = [Context("w", 900, rank=rank, round=rank + 1, shape=(30, 30)) for rank in (0, 3)]
    first, second = (PowerSgd().encode(x.reshape(-1), None, ctx)[0].data.tobytes() for ctx in ctxs)
    other = PowerSgd(PowerSgdParams(seed=1)).encode(x.reshape(-1), None, ctxs[0])[0].data.tobytes()
    assert first == second != other


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 29}, {"rows": 900, "columns": 1}, {"rank": 3}, {"rank": 31}, {"rank": -1}, {"rank": 1.5},
        {"scale": -1.0}, {"scale": 1e39}, {"rows": float("inf")}, {"columns": "x"},
    ],
)  # fmt: skip
def test_meta_that_lies_is_refused(change: dict[str, Any]) -> None:
    payload, _, ctx = encode(np.ones((30, 30), np.float32))
    with pytest.raises(PayloadError) as raised:
        PowerSgd().check(Payload(payload.data, {**payload.meta, **change}), ctx)
    assert raised.value.key == "w"


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0])
def test_factors_that_could_overflow_are_refused(value: float) -> None:
    payload, _, ctx = encode(np.ones((30, 30), np.float32))
    data = payload.data.copy()
    data.view(np.float32)[0] = value
    with pytest.raises(PayloadError):
        PowerSgd().check(Payload(data, payload.meta), ctx)


def test_rank_is_checked() -> None:
    with pytest.raises(ParameterError, match="rank"):
        PowerSgdParams(rank=0)
