"""The memory of what was not sent."""

from __future__ import annotations

import numpy as np

from kvstore.compression.codec import Context
from kvstore.compression.feedback import Residual, leave_unsent
from kvstore.compression.twobit import TwoBit

LIKE = np.zeros(1, np.float32)


def test_no_memory_before_the_first_use_and_after_the_last() -> None:
    residual = Residual(10, 4)
    assert not residual
    assert residual.export() is None
    assert residual.pending(0, 4, LIKE) is None
    residual.writable(0, 4, LIKE)[:] = 1
    residual.writable(4, 8, LIKE)[:] = 2
    assert residual
    residual.clear(0, 4)
    exported = residual.export()
    assert exported is not None
    assert exported.tolist() == [0] * 4 + [2] * 4 + [0] * 2
    residual.clear(4, 8)
    assert not residual
    assert residual.export() is None


def test_what_was_sent_is_forgotten_even_if_the_memory_is_used_again() -> None:
    residual = Residual(4, 2)
    residual.writable(0, 4, LIKE)[:] = 5
    residual.reset()
    assert residual.writable(0, 4, LIKE).tolist() == [0] * 4


def test_exported_values_are_a_copy_and_load_again() -> None:
    residual = Residual(4, 2)
    residual.writable(0, 2, LIKE)[:] = [1, -7]
    saved = residual.export()
    residual.writable(0, 2, LIKE)[:] = 0
    assert saved is not None
    assert saved.tolist() == [1, -7, 0, 0]
    other = Residual(4, 2)
    other.load(saved)
    assert other.bound == 7
    assert other.pending(0, 2, LIKE).tolist() == [1, -7]  # type: ignore[union-attr]


def test_chunks_and_the_whole_key_see_the_same_memory() -> None:
    residual = Residual(10, 4)
    residual.writable(4, 8, LIKE)[:] = 3
    whole = residual.pending(0, 10, LIKE)
    assert whole is not None
    assert whole.tolist() == [0] * 4 + [3] * 4 + [0] * 2
    whole[9] = 1
    assert residual.pending(8, 10, LIKE) is not None
    residual.clear(0, 10)
    assert not residual


def test_rule_for_any_codec_equals_the_fused_one(rng: np.random.Generator) -> None:
    codec, n = TwoBit(), 1000
    fused, separate = np.zeros(n, np.float32), np.zeros(n, np.float32)
    for round in range(1, 6):
        x, ctx = rng.standard_normal(n).astype(np.float32), Context("w", n, round=round)
        at_once, _ = codec.encode_feedback(x, fused, None, ctx)
        p = x + separate
        payload, _ = codec.encode(p, None, ctx)
        leave_unsent(codec, p, payload, separate, ctx)
        assert payload.data.tobytes() == at_once.data.tobytes()
        assert (separate == fused).all()
