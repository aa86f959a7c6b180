"""Deep gradient compression, against the paper's rule written out."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.compression.codec import Context
from kvstore.compression.dgc import Dgc, DgcParams
from kvstore.compression.encoder import KeyEncoder
from kvstore.compression.sparse import select_top

F4 = np.dtype(np.float32)


def test_it_is_the_papers_rule(rng: np.random.Generator) -> None:
    """u = m u + g, v = v + u; the largest of v are sent, and u and v become zero there (algorithm 4)."""
    params = DgcParams(ratio=0.05, warmup_stages=0)
    encoder = KeyEncoder("w", 200, F4)
    u, v = np.zeros(200, np.float32), np.zeros(200, np.float32)
    for round in range(1, 30):
        g = rng.standard_normal(200).astype(np.float32)
        (chunk,) = encoder.encode(encoder.prepare(g, params, round))
        sent = np.zeros(200, np.float32)
        Dgc().decode_add(chunk.payload, sent, Context("w", 200))
        u = u * np.float32(0.9) + g
        v = v + u
        chosen = select_top(v, 10)
        assert np.flatnonzero(sent).tolist() == chosen.tolist()
        assert sent[chosen].tobytes() == v[chosen].tobytes()
        u[chosen] = v[chosen] = 0
        kept = encoder.state()
        assert kept["momentum"].tobytes() == u.tobytes()
        assert kept["residual"].tobytes() == v.tobytes()


def test_warm_up_sends_a_quarter_less_each_stage() -> None:
    codec = Dgc(DgcParams(stage_rounds=10, warmup_rounds=5))
    shares = [codec.ratio_at(round) for round in (1, 6, 15, 16, 26, 36, 46, 10**6)]
    assert shares == [0.25, 0.25, 0.25, 0.0625, 0.015625, 0.00390625, 0.001, 0.001]
    assert Dgc(DgcParams(warmup_stages=0)).ratio_at(1) == 0.001
    assert Dgc(DgcParams(ratio=0.1)).ratio_at(101) == 0.1  # a stage below the ratio adds nothing


@pytest.mark.parametrize(("clip", "norm", "factor"), [(0, 5, 1), (10, 5, 1), (1, 4, 0.25), (5, 5, 1)])
def test_clipping_limits_the_norm(clip: float, norm: float, factor: float) -> None:
    assert Dgc(DgcParams(clip=clip)).clipped(norm) == factor


def test_clipping_comes_before_the_momentum() -> None:
    encoder = KeyEncoder("w", 4, F4, chunk_elements=64)
    params = DgcParams(clip=1.0, warmup_stages=0, ratio=0.25)
    g = np.array([3, 0, 0, 4], np.float32)  # of norm 5
    (chunk,) = encoder.encode(encoder.prepare(g, params))
    out = np.zeros(4, np.float32)
    Dgc().decode_add(chunk.payload, out, Context("w", 4))
    assert np.allclose(out, [0, 0, 0, 0.8])
    assert np.allclose(encoder.state()["momentum"], [0.6, 0, 0, 0])


def test_a_change_of_codec_sends_what_has_gathered() -> None:
    from kvstore.compression.none import NoneParams

    encoder = KeyEncoder("w", 100, F4)
    list(encoder.encode(encoder.prepare(np.ones(100, np.float32), DgcParams(warmup_stages=0, ratio=0.01))))
    (chunk,) = encoder.encode(encoder.prepare(np.zeros(100, np.float32), NoneParams(), 2))
    assert chunk.payload.data.view(np.float32).sum() == 99
    assert encoder.state() == {}
