"""After a warm-up nothing is compiled in the middle of a push, whatever arrays come."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

CODE = """
import sys, json, numpy as np
from kvstore.compression.codec import Context, Payload
from kvstore.compression.encoder import KeyEncoder
from kvstore.compression.policy import CompressionPolicy
from kvstore.compression.registry import codec_named
from kvstore.compression.warm_up import warm_up

def compiled():
    return {
        f"{module}.{name}": len(value.signatures)
        for module, contents in list(sys.modules.items()) if module.startswith("kvstore.compression.")
        for name, value in vars(contents).items() if hasattr(value, "signatures")
    }

policy = CompressionPolicy.parse(json.loads(sys.argv[1]))
warm_up(policy)
before = compiled()
rng = np.random.default_rng(0)
for n in (2, 100, 8191, 20000):
    for x in (rng.standard_normal(n), np.zeros(n), np.ones(n)):
        x = np.frombuffer(x.astype(np.float32).tobytes(), np.float32)
        encoder = KeyEncoder("w", n, x.dtype)
        for round in (1, 2):
            for chunk in encoder.encode(encoder.prepare(x, policy.default, round)):
                ctx, codec = Context("w", n), codec_named(chunk.codec)
                payload = Payload(b"1" + chunk.payload.data.tobytes(), chunk.payload.meta)
                payload = Payload(memoryview(payload.data)[1:], payload.meta)
                codec.check(payload, ctx)
                codec.decode_add(payload, np.zeros(n, np.float32), ctx)
changed = {name: count for name, count in compiled().items() if count != before.get(name, 0)}
print(json.dumps(changed), len(before) > 4)
"""

SETTINGS = [
    '{"type": "2bit"}',
    '{"type": "fp16"}',
    '{"type": "fp8"}',
    '{"type": "int8", "rounding": "stochastic"}',
    '{"type": "1bit"}',
    '{"type": "topk", "value_dtype": "bfloat16"}',
    '{"type": "randomk", "unbiased": true}',
    '{"type": "terngrad"}',
    '{"type": "natural"}',
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_is_compiled_after_a_warm_up(setting: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, setting], env={**os.environ, "KVSTORE_KERNELS": "auto"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    changed, _, loaded = done.stdout.strip().rpartition(" ")
    assert (changed, loaded) == ("{}", "True")
