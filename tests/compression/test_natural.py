"""natural: powers of two, right on average, variance one eighth at most."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.compression.codec import Context, Payload
from kvstore.compression.natural import Natural, NaturalParams
from kvstore.compression.registry import feedback_enabled
from kvstore.errors import PayloadError


def decoded(codec: Natural, x: Any, **where: Any) -> Any:
    ctx = Context("w", x.size, **where)
    out = np.zeros(x.size, np.float32)
    codec.decode_add(codec.encode(x, None, ctx)[0], out, ctx)
    return out


def test_powers_of_two_are_exact_and_the_edges_as_documented() -> None:
    x = np.array([1, -2, 0.125, 0, 1e-42, 3e38, -(2.0**127), 2.0**-126], np.float32)
    expected = [1, -2, 0.125, 0, 0, 2.0**127, -(2.0**127), 2.0**-126]
    assert decoded(Natural(), x).tolist() == expected


def test_right_on_average_with_a_variance_of_at_most_an_eighth(rng: np.random.Generator) -> None:
    x, draws = rng.standard_normal(200).astype(np.float32), 1000
    samples = np.stack([decoded(Natural(), x, round=round) for round in range(1, draws + 1)]).astype(np.float64)
    assert set(np.frexp(samples)[0].ravel().tolist()) <= {0.5, -0.5}
    deviation = np.abs(x) * (1 / 8) ** 0.5
    assert (np.abs(samples.mean(axis=0) - x) <= 6 * deviation / draws**0.5 + 1e-4 * np.abs(x)).all()
    assert ((samples - x) ** 2).sum(axis=1).mean() / (x.astype(float) ** 2).sum() == pytest.approx(0.081, abs=0.02)


def test_scaled_divides_by_one_and_an_eighth_and_takes_feedback() -> None:
    codec = Natural(NaturalParams(scaled=True))
    assert decoded(codec, np.ones(9, np.float32)).tolist() == [np.float32(8 / 9)] * 9
    assert feedback_enabled(codec)
    assert not feedback_enabled(Natural())


def test_infinity_and_scales_out_of_range_are_refused() -> None:
    for data, scale in ((b"\xff\0", 1.0), (b"\x7f\0", 0.0), (b"\x7f\0", 2.0)):
        with pytest.raises(PayloadError):
            Natural().check(Payload(data, {"scale": scale}), Context("w", 1))
