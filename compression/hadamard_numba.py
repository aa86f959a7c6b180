"""The Walsh-Hadamard transform in numba: the same bits as `hadamard.rotate_reference`. Imported on first use only."""

from __future__ import annotations

from kvstore.compression.kernels_numba import _jit as jit


@jit
def rotate(rows):  # type: ignore[no-untyped-def]
    """rows (m, d) float32, contiguous, in place."""
    m, d = rows.shape
    for row in range(m):
        x = rows[row]
        h = 1
        while h < d:
            for start in range(0, d, 2 * h):
                for i in range(start, start + h):
                    a, b = x[i], x[i + h]
                    x[i] = a + b
                    x[i + h] = a - b
            h *= 2
