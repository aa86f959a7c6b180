"""Feeds damaged and random payloads to the decoders of all codecs, for as long as asked.

    python scripts/fuzz_codecs.py --seconds 3600

Every payload must be refused with PayloadError, leaving the output as it was, or decode to finite values after `check`
accepted it. Anything else ends the run with the seed that repeats it.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from typing import Any

import click
import numpy as np

from kvstore.compression.codec import Context, Payload
from kvstore.compression.codings import Coding
from kvstore.compression.registry import codec_named, known_names, make_codec, parse_params
from kvstore.errors import PayloadError


def sample(name: str, rng: np.random.Generator) -> tuple[Payload, Context]:
    """A good payload of one codec, with parameters drawn where it is QSGD."""
    n = int(rng.integers(1, 5000))
    ctx = Context("fuzz", n, round=int(rng.integers(1, 9)))
    x = (rng.standard_normal(n) * rng.choice([1e-3, 1, 1e3])).astype(np.float32)
    x[rng.random(n) < rng.random()] = 0
    params: dict[str, Any] = {"type": name}
    if name == "qsgd":
        params["coding"] = str(rng.choice([coding.name.lower() for coding in Coding]))
        params["levels"] = int(
            rng.choice([1, 7, 23, 30] if params["coding"] == "unary" else [1, 7, 8, 127, 300, 32767])
        )
        params["bucket_size"] = int(rng.choice([1, 7, 64, 512, 10**6]))
        params["norm"] = str(rng.choice(["l2", "max"]))
    return make_codec(parse_params(params, top_level=False)).encode(x, None, ctx)[0], ctx


def damaged(payload: Payload, rng: np.random.Generator) -> Payload:
    """Bits flipped, cut, lengthened, replaced; numbers of the header changed."""
    data, meta = bytearray(payload.data.tobytes()), dict(payload.meta)
    kind = int(rng.integers(5))
    if kind == 0 and data:
        for _ in range(int(rng.integers(1, 9))):
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del data[int(rng.integers(len(data) + 1)) :]
    elif kind == 2:
        data += bytes(int(rng.integers(1, 40)))
    elif kind == 3:
        data[len(data) // 2 :] = rng.bytes(len(data) - len(data) // 2)
    numbers = [name for name, value in meta.items() if not isinstance(value, str)]
    if numbers and (kind == 4 or rng.random() < 0.3):
        value = rng.choice([-1, 0, 1, 7, 2**31, 2**63 - 1, int(rng.integers(100000))])
        meta[str(rng.choice(numbers))] = int(value)
    return Payload(bytes(data), meta)


def one(name: str, seed: int) -> str:
    """One payload; returns what became of it."""
    rng = np.random.default_rng(seed)
    payload, ctx = sample(name, rng)
    bad, codec, out = damaged(payload, rng), codec_named(name), np.zeros(ctx.n, np.float32)
    try:
        codec.check(bad, ctx)
    except PayloadError:
        try:
            codec.decode_add(bad, out, ctx)
        except PayloadError:
            assert not out.any(), "refused, but the output was changed"
            return "refused"
        raise AssertionError("check refuses what decode_add takes") from None
    codec.decode_add(bad, out, ctx)
    assert np.isfinite(out).all() or name == "none", "decoded to values that are not finite"
    return "decoded"


@click.command()
@click.option("--seconds", default=60.0, show_default=True)
@click.option("--codec", "names", multiple=True, help="only these; default: all")
@click.option("--seed", type=int, help="repeat one payload")
def main(seconds: float, names: tuple[str, ...], seed: int | None) -> None:
    """Fuzz, and print how many payloads were refused and decoded."""
    chosen = names or tuple(known_names())
    if seed is not None:
        for name in chosen:
            print(name, one(name, seed))
        return
    counts: Counter[tuple[str, str]] = Counter()
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        for name in chosen:
            number = secrets.randbits(48)
            try:
                counts[name, one(name, number)] += 1
            except Exception as error:
                raise click.ClickException(f"--codec {name} --seed {number}: {error!r}") from error
    for (name, result), count in sorted(counts.items()):
        print(f"{name:12} {result:8} {count}")


if __name__ == "__main__":
    main()
