"""The command bench-codec and its two forms of output."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvstore.server.bench_codec import Figure
from kvstore.server.bench_report import bench_json, print_bench
from kvstore.server.cli import cli

FIGURES = [
    Figure("none", 32, 0, 0.1, 0.1, 4000, 4000),
    Figure("2bit", 2, 0.75, 0.2, 0.1, 250, 4000),
    Figure("broken", error="ValueError: no"),
]


def test_the_table_says_all_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    print_bench(FIGURES, 1000.0, "1kB")
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if "│" in line]
    assert [line.split()[1] for line in lines] == ["2bit", "none", "broken"]
    assert "4250.0 ms" in lines[0]
    assert "ValueError: no" in lines[2]
    assert "0.0 million elements at 1kB" in text
    assert "Compression pays at this bandwidth: 2bit" in text


def test_programs_get_numbers() -> None:
    found = json.loads(bench_json(FIGURES, 1000.0))
    assert [row["name"] for row in found["codecs"]] == ["2bit", "none", "broken"]
    assert found["codecs"][0]["round_seconds"] == 4.25
    assert found["bandwidth"] == 1000


def test_the_command_measures_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((50, 60)))
    options = [
        "bench-codec",
        "--array",
        str(tmp_path / "x.npy"),
        "--codec",
        "eden,bits=4",
        "--json",
        "--bandwidth",
        "1kbit",
    ]
    result = CliRunner().invoke(cli, [*options, "--repeats", "1"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert sorted(row["name"] for row in found["codecs"]) == ["eden bits=4", "none"]
    assert found["verdict"].startswith("Compression pays at this bandwidth: eden bits=4")


@pytest.mark.parametrize(
    ("options", "text"),
    [(["--bandwidth", "much"], "bandwidth 'much'"), (["--codec", "3bit"], "'3bit' is not registered"),
     (["--array", "x.npy", "--model", "resnet50"], "not both")],
)  # fmt: skip
def test_wrong_options_are_told(options: list[str], text: str) -> None:
    result = CliRunner().invoke(cli, ["bench-codec", *options])
    assert result.exit_code == 2
    assert text in result.stderr
