"""The text of the CUDA kernels and how it is compiled; needs neither CuPy nor a device."""

from __future__ import annotations

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().with_name("cuda")

# Bits must be those of the CPU: no fused multiply-add, denormals kept. CuPy's own compilation appends -ftz=true,
# which wins over any option before it; so this project calls NVRTC itself and loads the binary.
OPTIONS = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

KERNELS = {"max_abs_bits": "max_abs", "quantise2": "twobit", "decode2": "twobit", "decode2_add_many": "twobit"}
"""Each kernel and the file it stands in."""


@cache
def source(name: str) -> str:
    """The text of one file, without the ending."""
    return (FOLDER / f"{name}.cu").read_text(encoding="utf-8")
