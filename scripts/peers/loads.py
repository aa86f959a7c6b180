"""The loads of the round benchmarks: lists of element counts, one per key. Standard library only.

Imported by foreign interpreters too (a peer's virtual environment), so it may not import the project.
"""

from __future__ import annotations


def resnet50() -> list[int]:
    """Element counts of the 161 trainable tensors of ResNet-50 (He et al. 2015, v1): 25,557,032 in all.

    The first convolution, four stages of bottleneck blocks (3, 4, 6, 3), a scale and a shift after every
    convolution, then the dense layer's weight and bias.
    """
    counts = _convolution(64, 3, 7)
    width_in = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            counts += _convolution(width, width_in, 1)
            counts += _convolution(width, width, 3)
            counts += _convolution(4 * width, width, 1)
            if block == 0:
                counts += _convolution(4 * width, width_in, 1)
            width_in = 4 * width
    return [*counts, 1000 * width_in, 1000]


def _convolution(width_out: int, width_in: int, kernel: int) -> list[int]:
    """One convolution without bias and the normalisation that follows it."""
    return [width_out * width_in * kernel * kernel, width_out, width_out]


LOADS: dict[str, list[int]] = {
    "resnet50": resnet50(),
    "one25m": [25_000_000],
    "small100": [1000] * 100,
    "tiny": [10],
}
