"""The demo's classifier in plain NumPy: one hidden layer, ReLU, softmax. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Weights: TypeAlias = dict[str, NDArray[Any]]
"""'hidden.weight' (pixels, hidden), 'hidden.bias' (hidden,), 'output.weight' (hidden, classes), 'output.bias'."""


def new_weights(pixels: int, hidden: int, classes: int, seed: int) -> Weights:
    """Draw weights, float32, normal with variance 2 / inputs (He et al. 2015, arXiv:1502.01852); biases are 0."""
    rng = np.random.default_rng(seed)

    def layer(inputs: int, outputs: int) -> NDArray[np.float32]:
        return rng.standard_normal((inputs, outputs), np.float32) * np.float32(np.sqrt(2 / inputs))

    return {
        "hidden.weight": layer(pixels, hidden), "hidden.bias": np.zeros(hidden, np.float32),
        "output.weight": layer(hidden, classes), "output.bias": np.zeros(classes, np.float32),
    }  # fmt: skip


def loss_and_gradients(
    weights: Mapping[str, NDArray[Any]], images: NDArray[Any], labels: NDArray[Any]
) -> tuple[float, Weights]:
    """Return the cross-entropy and its gradients, both summed over the samples, so that workers' sums add up.

    Args:
        weights: as `Weights`, floating point; gradients have their shapes and dtype.
        images: (samples, pixels), of the weights' dtype.
        labels: (samples,), integers.
    """
    hidden = _hidden(weights, images)
    scores = hidden @ weights["output.weight"] + weights["output.bias"]
    scores -= scores.max(axis=1, keepdims=True)
    logarithms = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    samples = np.arange(len(labels))
    loss = -float(logarithms[samples, labels].sum())

    error = np.exp(logarithms)  # of the scores; softmax less the wanted answer
    error[samples, labels] -= 1
    back = (error @ weights["output.weight"].T) * (hidden > 0)
    return loss, {
        "hidden.weight": images.T @ back, "hidden.bias": back.sum(axis=0),
        "output.weight": hidden.T @ error, "output.bias": error.sum(axis=0),
    }  # fmt: skip


def accuracy(weights: Mapping[str, NDArray[Any]], images: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the share of images, 0 to 1, whose largest score is the label's."""
    scores = _hidden(weights, images) @ weights["output.weight"] + weights["output.bias"]
    return float((scores.argmax(axis=1) == labels).mean())


def shards(samples: int, batch: int, rank: int, workers: int, seed: int, epoch: int) -> Iterator[NDArray[np.intp]]:
    """Yield, for every batch of an epoch, the indices of this worker's samples.

    Every worker shuffles alike, from (seed, epoch), and takes every `workers`-th sample of each batch. What is left
    at the end, less than a batch, waits for another epoch's shuffle.
    """
    order = np.random.default_rng((seed, epoch)).permutation(samples)
    for start in range(0, samples - batch + 1, batch):
        yield order[start + rank : start + batch : workers]


def _hidden(weights: Mapping[str, NDArray[Any]], images: NDArray[Any]) -> NDArray[Any]:
    activations: NDArray[Any] = np.maximum(images @ weights["hidden.weight"] + weights["hidden.bias"], 0)
    return activations
