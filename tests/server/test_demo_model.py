"""The demo's classifier: gradients against finite differences, sums over shards, learning."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.server.demo_model import Weights, accuracy, loss_and_gradients, new_weights, shards


def _problem(seed: int, samples: int = 7) -> tuple[Weights, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    weights = {key: value.astype(np.float64) for key, value in new_weights(5, 6, 4, seed).items()}
    for value in weights.values():
        value += 0.1 * rng.standard_normal(value.shape)
    return weights, rng.standard_normal((samples, 5)), rng.integers(0, 4, samples)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("key", ["hidden.weight", "hidden.bias", "output.weight", "output.bias"])
def test_gradients_are_finite_differences(key: str, seed: int) -> None:
    weights, images, labels = _problem(seed)
    gradient = loss_and_gradients(weights, images, labels)[1][key]
    step = 1e-6
    for index in np.ndindex(weights[key].shape):
        losses = []
        for change in (step, -step):
            moved = {**weights, key: weights[key].copy()}
            moved[key][index] += change
            losses.append(loss_and_gradients(moved, images, labels)[0])
        assert gradient[index] == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-4, abs=1e-7)


def test_loss_of_a_model_that_knows_nothing_is_log_of_the_classes() -> None:
    weights = {key: np.zeros_like(value) for key, value in new_weights(5, 6, 4, 0).items()}
    loss, _ = loss_and_gradients(weights, np.ones((3, 5), np.float32), np.array([0, 1, 3]))
    assert loss == pytest.approx(3 * np.log(4))


def test_large_scores_do_not_overflow() -> None:
    weights, images, labels = _problem(1)
    loss, gradients = loss_and_gradients(weights, images * 1e4, labels)
    assert np.isfinite(loss) and all(np.isfinite(gradient).all() for gradient in gradients.values())


def test_shards_add_up_to_the_batch() -> None:
    weights, images, labels = _problem(0, samples=12)
    whole = loss_and_gradients(weights, images, labels)[1]
    parts = [loss_and_gradients(weights, images[rank::3], labels[rank::3])[1] for rank in range(3)]
    for key, gradient in whole.items():
        np.testing.assert_allclose(sum(part[key] for part in parts), gradient, rtol=1e-12, atol=1e-12)


def test_weights_and_gradients_stay_float32() -> None:
    weights = new_weights(5, 6, 4, 0)
    gradients = loss_and_gradients(weights, np.ones((2, 5), np.float32), np.array([1, 2], np.uint8))[1]
    assert {value.dtype for value in (*weights.values(), *gradients.values())} == {np.dtype(np.float32)}
    assert {key: value.shape for key, value in gradients.items()} == {k: v.shape for k, v in weights.items()}
    assert not np.array_equal(weights["hidden.weight"], new_weights(5, 6, 4, 1)["hidden.weight"])


def test_every_epoch_deals_each_sample_to_one_worker() -> None:
    dealt = [list(shards(103, 10, rank, 3, seed=5, epoch=1)) for rank in range(3)]
    assert [len(batches) for batches in dealt] == [10, 10, 10]
    assert all(sum(len(batches[step]) for batches in dealt) == 10 for step in range(10))
    samples = np.concatenate([mine for batches in dealt for mine in batches])
    assert len(set(samples.tolist())) == 100
    other = list(shards(103, 10, 0, 3, seed=5, epoch=2))
    assert not np.array_equal(dealt[0][0], other[0])


def test_descent_learns() -> None:
    weights, images, _ = _problem(2, samples=40)
    labels = np.abs(images[:, :4]).argmax(axis=1)
    before = accuracy(weights, images, labels)
    for _ in range(300):
        for key, gradient in loss_and_gradients(weights, images, labels)[1].items():
            weights[key] -= 0.5 / 40 * gradient
    assert before < 0.7 < 0.9 < accuracy(weights, images, labels)
