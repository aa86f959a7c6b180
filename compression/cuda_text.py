"""The text of the CUDA kernels and how it is compiled; needs neither CuPy nor a device."""

from __future__ import annotations

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().with_name("cuda")

# Bits must be those of the CPU: no fused multiply-add, denormals kept. CuPy's own compilation appends -ftz=true,
# which wins over any option before it; so this project calls NVRTC itself and loads the binary.
OPTIONS = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

KERNELS = {
    "max_abs_bits": "max_abs",
    "quantise2": "twobit",
    "decode2": "twobit",
    "decode2_add_many": "twobit",
    "dither16": "dither",
}
"""Each kernel and the file it stands in."""

NEEDS = {"dither": ("philox",)}
"""Texts that stand in front of another: they hold device functions only, and are compiled with each file anew."""


@cache
def source(name: str) -> str:
    """What is compiled for one file (named without the ending): the texts it needs, then its own."""
    return "\n".join((FOLDER / f"{part}.cu").read_text(encoding="utf-8") for part in (*NEEDS.get(name, ()), name))
