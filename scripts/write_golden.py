"""Records payloads of a codec, which every later version must decode to the same values.

    python scripts/write_golden.py 2bit

Writes tests/compression/golden/<codec>/payloads.json, which is never written again: if the bytes of a codec change,
its name must change. Run it once for a new codec, and look at what it wrote.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click
import numpy as np

from kvstore.compression.codec import Context, SizedByShape
from kvstore.compression.registry import codec_named, known_names

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "compression" / "golden"
SIZES = (1, 2, 15, 16, 17, 100, 1000)
SHAPES = ((8, 16), (30, 40), (5, 3, 14))
"""Of keys for codecs that look at the shape."""
SEED = 1


def record(name: str, n: int, shape: tuple[int, ...] = ()) -> dict[str, Any]:
    """One payload: its bytes, its meta, and the float32 values it decodes to, as hexadecimal text."""
    codec, ctx = codec_named(name), Context(key="w", n=n, seed=SEED, shape=shape)
    x = np.random.default_rng(n).standard_normal(n, dtype=np.float32)
    payload, _ = codec.encode(x, None, ctx)
    out = np.zeros(n, np.float32)
    codec.decode_add(payload, out, ctx)
    decoded = out.astype("<f4").tobytes().hex()
    return {"n": n, "meta": dict(payload.meta), "data": payload.data.tobytes().hex(), "decoded": decoded}


@click.command()
@click.argument("codec", type=click.Choice(known_names()))
def main(codec: str) -> None:
    """Write the golden file of CODEC."""
    path = FOLDER / codec / "payloads.json"
    if path.exists():
        raise click.ClickException(f"{path} exists: recorded payloads are kept for ever")
    path.parent.mkdir(parents=True, exist_ok=True)
    payloads = [record(codec, n) for n in SIZES]
    if isinstance(codec_named(codec), SizedByShape):
        payloads += [record(codec, math.prod(shape), shape) for shape in SHAPES]
    path.write_text(json.dumps({"codec": codec, "payloads": payloads}, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
