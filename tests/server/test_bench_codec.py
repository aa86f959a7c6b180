"""bench-codec: figures of known codecs, predicted times, bandwidths, files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from kvstore.compression.registry import known_names
from kvstore.errors import ArrayError, ParameterError, UnknownNameError
from kvstore.server import bench_codec as bench
from kvstore.server.bench_codec import Figure

MILLION = 10**6


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1gbit", 125e6), ("100 Mbit/s", 12.5e6), ("1.5GB", 1.5e9), ("8bit", 1), ("2kB/s", 2000)],
)
def test_bandwidths_are_read(text: str, expected: float) -> None:
    assert bench.parse_bandwidth(text) == expected


@pytest.mark.parametrize("text", ["", "fast", "1", "-1gbit", "0gbit", "1.2.3gbit", "1xbit"])
def test_what_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match="1gbit") as raised:
        bench.parse_bandwidth(text)
    assert raised.value.parameter == "bandwidth"


def test_codecs_are_read() -> None:
    assert bench.label(bench.parse_codec("2bit,threshold=2")) == "2bit threshold=2.0"
    assert bench.label(bench.parse_codec("none")) == "none"
    with pytest.raises(ParameterError, match="NAME=VALUE"):
        bench.parse_codec("2bit,threshold")
    with pytest.raises(UnknownNameError):
        bench.parse_codec("3bit")


def test_figures_are_right(rng: np.random.Generator) -> None:
    arrays = [rng.standard_normal((300, 200)).astype(np.float32), rng.standard_normal(1000).astype(np.float32)]
    none = bench.measure(arrays, bench.parse_codec("none"), 1)
    assert (none.bits, none.nmse, none.sent_bytes, none.raw_bytes) == (32, 0, 244000, 244000)
    eden = bench.measure(arrays, bench.parse_codec("eden"), 2)
    assert eden.nmse == pytest.approx(0.133, rel=0.05)
    assert 2 < eden.bits < 2.1
    dgc = bench.measure(arrays, bench.parse_codec("dgc"), 2)
    assert dgc.bits == pytest.approx(64 * 0.001, rel=0.1)  # past its warm-up
    assert all(figure.encode_seconds > 0 and figure.decode_seconds > 0 for figure in (none, eden, dgc))


def test_rounds_are_predicted_by_the_slowest_stage() -> None:
    figure = Figure("x", encode_seconds=1, decode_seconds=2, sent_bytes=10, raw_bytes=40)
    assert figure.round_seconds(10) == 2 + 4
    assert figure.round_seconds(1) == 10 + 40


def test_the_verdict_depends_on_the_bandwidth() -> None:
    figures = [
        Figure("none", sent_bytes=100 * MILLION, raw_bytes=100 * MILLION),
        Figure("2bit", encode_seconds=0.1, sent_bytes=6 * MILLION, raw_bytes=100 * MILLION),
        Figure("broken", error="ValueError: no"),
    ]
    assert (
        bench.verdict(figures, 1e8)
        == "Compression pays at this bandwidth: 2bit takes 55% of the raw round's 2000.0 ms."
    )
    assert bench.verdict(figures, 1e10).startswith(
        "Compression does not pay at this bandwidth: a raw round takes 20.0 ms"
    )
    assert [figure.name for figure in bench.best_first(figures, 1e8)] == ["2bit", "none", "broken"]
    assert [figure.name for figure in bench.best_first(figures, 1e10)] == ["none", "2bit", "broken"]


def test_a_codec_that_fails_is_told_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> Figure:
        raise ValueError("no")

    monkeypatch.setattr(bench, "measure", failing)
    assert [figure.error for figure in bench.measure_all([], bench.default_codecs())] == ["ValueError: no"] * len(
        known_names()
    )


def test_every_registered_codec_is_measured() -> None:
    figures = bench.measure_all([np.ones((64, 64), np.float32)], bench.default_codecs(), 1)
    assert {figure.name: figure.error for figure in figures} == dict.fromkeys(known_names(), "")


def test_resnet50_has_its_published_size() -> None:
    shapes = list(bench.resnet50_shapes())
    assert (len(shapes), sum(math.prod(shape) for shape in shapes)) == (161, 25_557_032)


def test_arrays_come_from_files(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.ones((3, 4)))
    (array,) = bench.read_array(path)
    assert array.shape == (3, 4)
    assert array.dtype == np.float32
    for bad in (np.ones(3, int), np.zeros(0), np.array([np.nan])):
        np.save(path, bad)
        with pytest.raises(ArrayError, match=r"x\.npy"):
            bench.read_array(path)
    np.save(path, np.array([{}], object), allow_pickle=True)
    with pytest.raises(ArrayError):
        bench.read_array(path)
    with pytest.raises(ArrayError):
        bench.read_array(tmp_path / "missing.npy")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)
