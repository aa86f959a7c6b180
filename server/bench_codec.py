"""`kvstore-server bench-codec`: what each codec makes of an array, how fast, and when that pays.

The predicted time of a round is that of one worker and one server over the given bandwidth (so also of n workers and n
servers): chunks are encoded, sent and decoded in a pipeline, so pushing takes as long as the slowest of the three; then
the values come back in full precision.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.compression.codec import Context, Params
from kvstore.compression.encoder import EncodedChunk, KeyEncoder
from kvstore.compression.registry import codec_named, known_names, parse_params
from kvstore.errors import ArrayError, ParameterError

Floats = NDArray[np.float32]
LATE_ROUND = 1_000_000
"""Beyond all warm-ups."""
PAYS = 0.95
"""Compression pays if its round takes at most this share of the raw one's."""

_UNITS = {"bit": 1 / 8, "b": 1.0}
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Figure:
    """One codec over all arrays. Seconds are those of one thread; `nmse` is |decoded - x|^2 / |x|^2 of the first push.

    `error`: why it could not be measured.
    """

    name: str
    bits: float = 0.0
    nmse: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    sent_bytes: int = 0
    raw_bytes: int = 0
    error: str = ""

    def round_seconds(self, bandwidth: float) -> float:
        """Predicted; `bandwidth` in bytes per second."""
        push = max(self.encode_seconds, self.sent_bytes / bandwidth, self.decode_seconds)
        return push + self.raw_bytes / bandwidth


def parse_bandwidth(text: str) -> float:
    """Bytes per second of '1gbit', '100 Mbit/s', '1.5GB'.

    Raises:
        ParameterError: it is none.
    """
    found = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)(bit|b)(?:/s|ps)?", text.strip(), re.IGNORECASE)
    try:
        assert found is not None
        amount = float(found[1]) * _SCALES[found[2].lower()] * _UNITS[found[3].lower()]
        assert amount > 0
    except (AssertionError, ValueError) as error:
        allowed = "a number with bit or B, such as 1gbit, 100mbit or 1.5GB, per second"
        raise ParameterError(
            f"bandwidth {text!r}: allowed is {allowed}", parameter="bandwidth", given=text, allowed=allowed
        ) from error
    return amount


def parse_codec(text: str) -> Params:
    """Parameters from 'qsgd,bits=8'. Raises ParameterError, UnknownNameError."""
    name, *pairs = text.split(",")
    fields: dict[str, object] = {"type": name}
    for pair in pairs:
        field, separator, value = pair.partition("=")
        if not separator:
            raise ParameterError(
                f"codec {text!r}: {pair!r} is no NAME=VALUE", parameter="codec", given=text, allowed="TYPE,NAME=VALUE"
            )
        fields[field] = value
    return parse_params(fields, top_level=False)


def read_array(path: Path) -> list[Floats]:
    """The array of an .npy file as float32. Raises ArrayError."""
    try:
        array = np.load(path, allow_pickle=False)
        if array.dtype.kind != "f" or not array.size or not np.isfinite(array).all():
            raise ValueError(f"{array.size} elements of {array.dtype}; finite floating point values are needed")
    except (OSError, ValueError) as error:
        raise ArrayError(f"{path}: {error}") from error
    return [np.ascontiguousarray(array, np.float32)]


def resnet50() -> list[Floats]:
    """Stand-ins for the gradients of ResNet-50: its 161 shapes, 25.6 million normal numbers, a scale for each array."""
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal(shape, np.float32) * np.float32(10.0 ** rng.uniform(-4, -2)) for shape in resnet50_shapes()
    ]


def resnet50_shapes() -> Iterator[tuple[int, ...]]:
    """He et al. 2015, arXiv:1512.03385: convolutions without bias, each with a batch norm's two vectors."""

    def convolution(out: int, into: int, size: int) -> Iterator[tuple[int, ...]]:
        yield from ((out, into, size, size), (out,), (out,))

    yield from convolution(64, 3, 7)
    into = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from convolution(width, into, 1)
            yield from convolution(width, width, 3)
            yield from convolution(4 * width, width, 1)
            if block == 0:
                yield from convolution(4 * width, into, 1)
            into = 4 * width
    yield from ((1000, 2048), (1000,))


def measure_all(arrays: Sequence[Floats], params: Iterable[Params], repeats: int = 3) -> list[Figure]:
    """A figure for each codec; one that fails is told by its error."""
    figures = []
    for one in params:
        try:
            figures.append(measure(arrays, one, repeats))
        except Exception as error:  # codecs of others are measured too: one that fails must not hide the rest
            figures.append(Figure(label(one), error=f"{type(error).__name__}: {error}"))
    return figures


def measure(arrays: Sequence[Floats], params: Params, repeats: int = 3) -> Figure:
    """Encode and decode every array `repeats` times as a store does; the least times count."""
    encoders = [KeyEncoder(str(i), x.size, x.dtype, shape=x.shape) for i, x in enumerate(arrays)]
    encode, decode, first = float("inf"), float("inf"), None
    for repeat in range(repeats):
        encoded, seconds = _encode(arrays, encoders, params, LATE_ROUND + repeat)
        encode = min(encode, seconds)
        first = encoded if first is None else first
    assert first is not None
    decoded: list[Floats] = []
    for _ in range(repeats):
        decoded, seconds = _decode(arrays, first)
        decode = min(decode, seconds)
    error = sum(
        float(np.square(out - x.reshape(-1), dtype=np.float64).sum()) for out, x in zip(decoded, arrays, strict=True)
    )
    size = sum(float(np.square(x, dtype=np.float64).sum()) for x in arrays)
    sent, n = sum(chunk.nbytes for chunks in first for chunk in chunks), sum(x.size for x in arrays)
    return Figure(label(params), 8 * sent / n, error / size if size else 0.0, encode, decode, sent, 4 * n)


def _encode(
    arrays: Sequence[Floats], encoders: Sequence[KeyEncoder], params: Params, round: int
) -> tuple[list[list[EncodedChunk]], float]:
    start = time.perf_counter()
    encoded = [
        list(encoder.encode(encoder.prepare(x, params, round))) for encoder, x in zip(encoders, arrays, strict=True)
    ]
    return encoded, time.perf_counter() - start


def _decode(arrays: Sequence[Floats], encoded: Sequence[Sequence[EncodedChunk]]) -> tuple[list[Floats], float]:
    outs = [np.zeros(x.size, np.float32) for x in arrays]
    start = time.perf_counter()
    for i, (out, chunks) in enumerate(zip(outs, encoded, strict=True)):
        for chunk in chunks:
            context = Context(str(i), chunk.n, chunk.index, chunk.offset, round=LATE_ROUND)
            codec_named(chunk.codec).decode_add(chunk.payload, out[chunk.offset : chunk.offset + chunk.n], context)
    return outs, time.perf_counter() - start


def label(params: Params) -> str:
    """'qsgd bits=8': the type and what is not default."""
    default: Any = type(params)()
    given = (f"{name}={getattr(params, name)}" for name in params.__struct_fields__
             if getattr(params, name) != getattr(default, name))  # fmt: skip
    return " ".join([params.type, *given])


def default_codecs() -> list[Params]:
    """Every registered codec with its defaults."""
    return [parse_params({"type": name}, top_level=False) for name in known_names()]


def best_first(figures: Iterable[Figure], bandwidth: float) -> list[Figure]:
    """By predicted time; those that failed last."""
    return sorted(figures, key=lambda figure: (bool(figure.error), figure.round_seconds(bandwidth), figure.name))


def verdict(figures: Sequence[Figure], bandwidth: float) -> str:
    """In one sentence: does compression pay, and which codec most."""
    raw = next(figure for figure in figures if figure.name == "none").round_seconds(bandwidth)
    best = best_first(figures, bandwidth)[0]
    share = best.round_seconds(bandwidth) / raw
    if share > PAYS:
        return (
            f"Compression does not pay at this bandwidth: a raw round takes {raw * 1e3:.1f} ms, the best codec's "
            f"{best.round_seconds(bandwidth) * 1e3:.1f} ms."
        )
    return f"Compression pays at this bandwidth: {best.name} takes {share:.0%} of the raw round's {raw * 1e3:.1f} ms."
