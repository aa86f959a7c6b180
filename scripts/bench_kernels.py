"""Times the compression kernels against np.copyto of the same array, on one thread.

    python scripts/bench_kernels.py --elements 24999936 --rounds 9

Each figure is the median of paired rounds (one copy, one kernel) in the thread's own CPU time, so a busy machine
disturbs the ratio little. `bar` must hold on any x86 machine with AVX2, `aim` is what the kernel shape allows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from kvstore.compression import kernels
from kvstore.compression.codings import Coding
from kvstore.compression.dense_numpy import E4M3, FP16, blocks_of
from kvstore.compression.encoder import CHUNK_ELEMENTS, KeyEncoder
from kvstore.compression.kernels import Kernels
from kvstore.compression.kernels_numpy import packed_size
from kvstore.compression.twobit import TwoBitParams

THRESHOLD = 0.5
WORKERS = 8


class Case(NamedTuple):
    """One row: what runs, the ratio it must reach, the ratio it aims at."""

    name: str
    run: Callable[[], object]
    bar: float
    aim: float


class Figure(NamedTuple):
    """Median seconds and median ratio to np.copyto."""

    case: Case
    seconds: float
    ratio: float


def cases(twin: Kernels, gradient: NDArray[np.float32]) -> list[Case]:
    """The kernels and the whole push side, over arrays as large as `gradient`."""
    n = gradient.size
    residual, out = np.zeros(n, np.float32), np.zeros(n, np.float32)
    packed = [np.zeros(packed_size(n), np.uint8) for _ in range(WORKERS)]
    for data in packed:
        twin.quantise2(gradient, residual, THRESHOLD, data)
    encoder, params = KeyEncoder("w", n, gradient.dtype), TwoBitParams(threshold=THRESHOLD)

    def push_side() -> None:
        for _ in encoder.encode(encoder.prepare(gradient, params)):
            pass

    return [
        Case("finite check", lambda: twin.max_abs(gradient), 0.7, 0.42),
        Case("quantise + residual", lambda: twin.quantise2(gradient, residual, THRESHOLD, packed[0]), 1.4, 1.0),
        Case("push side: check + encode, chunked", push_side, 1.8, 1.4),
        Case("decode", lambda: twin.decode2(packed[0], THRESHOLD, out), 0.7, 0.55),
        Case("decode-add", lambda: twin.decode2_add(packed[0], THRESHOLD, out), 0.7, 0.55),
        Case(f"{WORKERS}-way decode-add", lambda: twin.decode2_add_many(packed, THRESHOLD, out), 2.0, 1.4),
    ]


def qsgd_cases(gradient: NDArray[np.float32]) -> list[Case]:
    """QSGD with Philox and buckets of 512; codes chunk after chunk, as in a push, over levels made before."""
    ops = kernels.family_for("qsgd", gradient)
    coders = kernels.family_for("codings", gradient)
    n, d, out = gradient.size, 512, np.zeros_like(gradient)
    spans = [slice(start, min(start + CHUNK_ELEMENTS, n)) for start in range(0, n, CHUNK_ELEMENTS)]
    copy_ns = _copy_ns(gradient, out)

    def each(call: Callable[[int, slice], object]) -> Callable[[], object]:
        def run() -> None:
            for number, span in enumerate(spans):
                call(number, span)

        return run

    found = []
    for bits, bar, aim in ((4, 2.5, 1.4), (8, 2.4, 1.3)):
        s = (1 << (bits - 1)) - 1
        coded = ops.quantise_fixed(gradient, d, s, False, 1, 0)

        def quantise(s: int = s) -> None:
            ops.quantise_fixed(gradient, d, s, False, 1, 0)

        def decode(coded: Any = coded, bits: int = bits) -> None:
            ops.decode_fixed(coded[1], coded[0], d, bits, out, False)

        found.append(Case(f"qsgd {bits} bit", quantise, bar, aim))
        found.append(Case(f"qsgd {bits} bit decode", decode, 0.75, 0.6))
    levels = [ops.quantise(gradient[span], d, 23, True, 1, number)[1] for number, span in enumerate(spans)]
    bars = {Coding.HUFFMAN: (3.0, 4.0), Coding.ELIAS_DENSE_NZ: (5 / copy_ns, 10 / copy_ns)}
    for coding in (Coding.HUFFMAN, Coding.ELIAS_DENSE, Coding.ELIAS_DENSE_NZ, Coding.ELIAS_SPARSE):
        streams = [coders.encode(coding, one, d, 23) for one in levels]
        write, read = bars.get(coding, bars[Coding.ELIAS_DENSE_NZ])

        def encode(number: int, span: slice, coding: Coding = coding) -> None:
            coders.encode(coding, levels[number], d, 23)

        def read_back(number: int, span: slice, coding: Coding = coding, streams: list[Any] = streams) -> None:
            coders.decode(coding, *streams[number], levels[number].size, d, 23)

        name = coding.name.lower()
        found.append(Case(f"{name} encode, s = 23", each(encode), write, 2.2))
        found.append(Case(f"{name} decode, s = 23", each(read_back), read, 2.2))
    return found


def _copy_ns(source: NDArray[np.float32], copy: NDArray[np.float32]) -> float:
    """Nanoseconds per element of np.copyto: turns bars in time into ratios."""
    seconds = []
    for _ in range(7):
        start = time.thread_time()
        np.copyto(copy, source)
        seconds.append(time.thread_time() - start)
    return 1e9 * statistics.median(seconds) / source.size


def sign_cases(twin: Kernels, gradient: NDArray[np.float32]) -> list[Case]:
    """One bit, casts and blocks."""
    n = gradient.size
    dense: Any = kernels.family_of("dense", twin)
    residual, out, one = np.zeros(n, np.float32), np.zeros(n, np.float32), np.ones(1, np.float32)
    means, bits = np.empty(2 * blocks_of(n, 1024), np.float32), np.empty(blocks_of(n, 8), np.uint8)
    halves, scales, bytes_ = np.empty(n, np.uint16), np.empty(blocks_of(n, 256), np.float32), np.empty(n, np.uint8)

    def fp8() -> None:
        dense.block_scales(gradient, 256, E4M3.largest, scales)
        dense.encode_floats(gradient, scales, 256, E4M3, bytes_)

    def int8() -> None:
        dense.block_scales(gradient, 256, 127, scales)
        dense.encode_ints(gradient, scales, 256, bytes_.view(np.int8))

    return [
        Case("1bit + residual", lambda: dense.encode_signs(gradient, residual, 1024, 2, means, bits), 1.3, 1.0),
        Case("1bit decode-add", lambda: dense.decode_signs_add(bits, means, 1024, 2, out), 0.8, 0.6),
        Case("fp16", lambda: dense.encode_floats(gradient, one, n, FP16, halves), 2.5, 1.3),
        Case("fp16 decode-add", lambda: dense.decode_floats_add(halves, one, n, FP16, out), 1.8, 1.0),
        Case("int8 block 256", int8, 2.5, 1.3),
        Case("int8 decode-add", lambda: dense.decode_ints_add(bytes_.view(np.int8), scales, 256, out), 1.3, 0.7),
        Case("fp8 block 256", fp8, 3.5, 2.0),
    ]


def sparse_cases(twin: Kernels, gradient: NDArray[np.float32]) -> list[Case]:
    """One element in a hundred: the largest, or one of each stratum."""
    sparse: Any = kernels.family_of("sparse", twin)
    out, values = np.zeros_like(gradient), np.empty(gradient.size // 100, np.float32)
    return [
        Case("exact top 1 %", lambda: sparse.select_largest(gradient, values.size), 1.7, 1.25),
        Case("random 1 %: compress", lambda: sparse.gather_strata(gradient, 1, 0, False, values), 0.7, 0.5),
        Case("random 1 %: scatter-add", lambda: sparse.scatter_strata_add(values, 1, 0, out), 0.4, 0.27),
    ]


def measure(case: Case, source: NDArray[np.float32], copy: NDArray[np.float32], rounds: int) -> Figure:
    """Run copy and kernel in turn; the first pair only warms up."""
    seconds, ratios = [], []
    for number in range(rounds + 1):
        start = time.thread_time()
        np.copyto(copy, source)
        middle = time.thread_time()
        case.run()
        end = time.thread_time()
        if number:
            seconds.append(end - middle)
            ratios.append((end - middle) / (middle - start))
    return Figure(case, statistics.median(seconds), statistics.median(ratios))


def table(figures: list[Figure], title: str) -> Table:
    """What is printed."""
    result = Table(title=title)
    for column, justify in (
        ("kernel", "left"),
        ("ms", "right"),
        ("x copyto", "right"),
        ("bar", "right"),
        ("aim", "right"),
    ):
        result.add_column(column, justify=justify)  # type: ignore[arg-type]
    for case, seconds, ratio in figures:
        style = "green" if ratio <= case.bar else "red"
        row = (case.name, f"{1e3 * seconds:.2f}", f"[{style}]{ratio:.2f}[/]", f"{case.bar:.2f}", f"{case.aim:.2f}")
        result.add_row(*row)
    return result


@click.command()
@click.option("--elements", default=24_999_936, show_default=True, help="float32 elements of the array")
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(min=7), help="paired rounds per kernel")
@click.option("--kernels", "choice", default="auto", show_default=True, type=click.Choice(kernels.CHOICES))
def main(elements: int, rounds: int, choice: str) -> None:
    """Print one row per kernel."""
    twin = kernels.cpu_kernels(choice)
    twin.warm_up()
    gradient = np.random.default_rng(0).standard_normal(elements, dtype=np.float32)
    copy: NDArray[Any] = np.zeros_like(gradient)
    rows = [*cases(twin, gradient), *sign_cases(twin, gradient), *sparse_cases(twin, gradient)]
    rows += qsgd_cases(gradient) if twin.NAME == "numba" else []
    figures = [measure(case, gradient, copy, rounds) for case in rows]
    Console().print(table(figures, f"{elements:,} floats, one thread, {twin.NAME} kernels"))


if __name__ == "__main__":
    main()
