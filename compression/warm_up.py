"""Compiles what a setting's codecs run before they are needed: nothing is compiled in the middle of a push."""

from __future__ import annotations

import logging
import time
from functools import cache

import numpy as np

from kvstore.compression import kernels
from kvstore.compression.codec import Context, Params
from kvstore.compression.policy import CompressionPolicy
from kvstore.compression.registry import make_codec

log = logging.getLogger(__name__)

_ELEMENTS = 16384  # enough, varied and constant, for every way a kernel goes


def warm_up(policy: CompressionPolicy | None) -> None:
    """Compile the kernels of every codec of the setting, or load them from the cache; in the log if that takes long."""
    kernels.warm_up()
    if policy is not None:
        for params in {
            params for params in (policy.default, *(own for _, own in policy.per_key)) if params is not None
        }:
            _run_once(params)


@cache
def _run_once(params: Params) -> None:
    codec = make_codec(params)
    if codec.unit == "key":
        return  # these are plain array arithmetic
    start = time.perf_counter()
    ctx = Context("warm-up", _ELEMENTS)
    for x in (np.sin(np.arange(_ELEMENTS, dtype=np.float32)), np.ones(_ELEMENTS, np.float32)):
        payload, _ = codec.encode(x, None, ctx)
        codec.check(payload, ctx)
        codec.decode_add(payload, x, ctx)
    seconds = time.perf_counter() - start
    if seconds > 1:
        log.info("compiled the kernels of %s in %.1f s; later processes load them from the cache", params.type, seconds)
