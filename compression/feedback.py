"""Error feedback: what a codec left unsent is kept, and added to the next push.

p = x + residual; send C(p); residual = p - C(p) (Seide et al. 2014; Karimireddy et al. 2019,
arXiv:1901.09847). `Residual` is the memory of one key at one worker; `leave_unsent` is the rule for any codec.
Codecs that do it in one pass satisfy `FusedFeedback`.
"""

from __future__ import annotations

import numpy as np

from kvstore.compression.codec import Array, Codec, Context, Payload
from kvstore.compression.kernels import kernels_for


class Residual:
    """The unsent gradient (or the momentum) of one whole key, float32, beside the gradients (host or device).

    Memory is taken at the first compressed push and given back when everything was sent raw. `bound` is a
    number that no element's absolute value exceeds: it tells cheaply that x + residual cannot overflow.
    """

    def __init__(self, n: int, chunk_elements: int) -> None:
        self.n = n
        self.chunk_elements = chunk_elements
        self.bound = 0.0
        self._values: Array | None = None
        self._pending: set[int] = set()  # starts of the chunks that may hold something

    def __bool__(self) -> bool:
        """Whether anything may be unsent."""
        return bool(self._pending)

    def writable(self, start: int, stop: int, like: Array) -> Array:
        """The elements start..stop, one chunk or all, where `like` lies, for an update in place."""
        if self._values is None:
            self._values = np.zeros_like(like, np.float32, shape=(self.n,))
        elif not (isinstance(self._values, np.ndarray) and isinstance(like, np.ndarray)):
            self._values = kernels_for(like).to_device(self._values, like)
        self._pending.update(range(start, stop, self.chunk_elements))
        return self._values[start:stop]

    def pending(self, start: int, stop: int, like: Array) -> Array | None:
        """The elements start..stop, None if they are all zero."""
        held = any(chunk in self._pending for chunk in range(start, stop, self.chunk_elements))
        return self.writable(start, stop, like) if held else None

    def clear(self, start: int, stop: int) -> None:
        """Everything of these elements has been sent."""
        chunks = self._pending.intersection(range(start, stop, self.chunk_elements))
        if chunks and self._values is not None:
            self._values[start:stop] = 0
            self._pending -= chunks
        if not self._pending:
            self.reset()

    def reset(self) -> None:
        """Forget everything unsent."""
        self._values, self.bound = None, 0.0
        self._pending.clear()

    def export(self) -> Array | None:
        """A host copy of the n values, None if nothing is unsent."""
        if self._values is None or not self._pending:
            return None
        return np.array(kernels_for(self._values).to_host(self._values))

    def load(self, values: Array) -> None:
        """Take over exported values."""
        self._values = np.array(values, np.float32).reshape(self.n)
        self._pending = set(range(0, self.n, self.chunk_elements))
        self.bound = kernels_for(self._values).max_abs(self._values)


def leave_unsent(codec: Codec, p: Array, payload: Payload, residual: Array, ctx: Context) -> Array:
    """residual <- p - decoded(payload): the general rule, for codecs that do not do it themselves. Returns decoded."""
    sent = np.zeros_like(p)
    codec.decode_add(payload, sent, ctx)
    np.subtract(p, sent, out=residual)
    return sent
