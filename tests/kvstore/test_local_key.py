"""One key of a local store: what a push checks, and what it changes."""

from typing import Any

import numpy as np
import pytest

from kvstore.arrays import describe
from kvstore.compression.policy import CompressionPolicy
from kvstore.dtypes import DTYPES
from kvstore.errors import NonFiniteError
from kvstore.local_key import LocalKey
from kvstore.optimizer import create_optimizer, make_spec

TWO_BIT = CompressionPolicy.parse({"type": "2bit", "threshold": 0.5})


def local_key(n: int = 64, name: str = "float32") -> LocalKey:
    value = np.zeros((n,), DTYPES[name])
    return LocalKey("w", value, describe(value, "w"))


def test_fitting_changes_nothing() -> None:
    local = local_key()
    for _ in range(3):
        fit = local.fit([np.full(64, 0.25, np.float32)], TWO_BIT, on_device=True)
    assert local.counters.pushes == 0
    assert local.reduce(fit).tolist() == [0.0] * 64


def test_raw_pushes_are_read_in_place() -> None:
    gradient = np.ones(64, np.float32)
    fit = local_key().fit([gradient], None, on_device=False)
    assert np.shares_memory(fit.flats[0], gradient)
    assert fit.encoded == ()


def test_every_array_is_checked_before_any_is_encoded() -> None:
    local = local_key()
    local.reduce(local.fit([np.full(64, 0.25, np.float32)] * 2, TWO_BIT, on_device=True))
    with pytest.raises(NonFiniteError):
        local.fit([np.full(64, 0.25, np.float32), np.full(64, np.nan, np.float32)], TWO_BIT, on_device=True)
    assert local.reduce(local.fit([np.full(64, 0.25, np.float32)] * 2, TWO_BIT, on_device=True))[0] == 1.0


def test_integers_go_raw_under_a_store_wide_setting() -> None:
    local = local_key(name="int64")
    fit = local.fit([np.full(64, 2**40, np.int64)] * 2, TWO_BIT, on_device=True)
    assert local.reduce(fit)[0] == 2**41
    assert local.counters.sent_bytes == local.counters.raw_bytes == 1024


def test_pending_residuals_leave_with_the_next_raw_push() -> None:
    local = local_key()
    local.reduce(local.fit([np.full(64, 0.25, np.float32)], TWO_BIT, on_device=True))
    assert local.reduce(local.fit([np.ones(64, np.float32)], None, on_device=True))[0] == 1.25
    assert local.fit([np.ones(64, np.float32)], None, on_device=True).encoded == ()


@pytest.mark.parametrize("n", [0, 1, 15, 64])
def test_small_and_empty_keys(n: int) -> None:
    local = local_key(n)
    assert local.n == n
    total = local.reduce(local.fit([np.ones(n, np.float32)] * 2, TWO_BIT, on_device=True))
    expected = 2.0 if n == 1 else 1.0  # one element is smaller raw
    assert total.tolist() == [expected] * n


def test_overflow_of_half_precision_shows_as_infinity() -> None:
    local = local_key(2, "float16")
    total = local.reduce(local.fit([np.full(2, 60000, np.float16)] * 2, None, on_device=False))
    local.replace(total)
    assert local.master.tolist() == [120000.0] * 2
    assert np.isinf(local.value()).all()


def test_updates_count_and_start_afresh() -> None:
    local = local_key(3)
    rule = create_optimizer(make_spec("sgd", learning_rate=1.0, momentum=0.5, wd=0.0))
    for _ in range(2):
        local.update(rule, np.ones(3, np.float32))
    assert (local.step, local.master.tolist()) == (2, [-2.5] * 3)
    local.forget_updates()
    assert (local.step, local.state) == (0, None)


def test_the_updater_sees_the_shape_of_the_key() -> None:
    value = np.zeros((2, 3), np.float16)
    local = LocalKey("w", value, describe(value, "w"))
    seen: list[Any] = []
    local.update_by(lambda key, gradient, stored: seen.append((key, gradient, stored)), np.ones(6, np.float32))
    key, gradient, stored = seen[0]
    assert (key, gradient.shape, stored.shape, stored.dtype) == ("w", (2, 3), (2, 3), np.float32)
