"""Pushes and pulls of one call as parts: what is counted, batched, asked for, and given back."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore import dist_exchange
from kvstore.arrays import Template
from kvstore.compression.policy import RAW
from kvstore.compression.registry import parse_params
from kvstore.dist_exchange import finisher, pull_parts, push_parts, pushed_bytes
from kvstore.dist_key import Destination, DistKey
from kvstore.messages import ChunkEntry
from kvstore.operation import Pull, Push


def key(name: str = "w", elements: int = 100) -> DistKey:
    return DistKey(name, Template((elements,), np.dtype(np.float32)), 64, 2, 0, epoch=1)


def gradient(elements: int = 100) -> Any:
    return np.arange(elements, dtype=np.float32)


def test_push_takes_one_round_of_every_chunk() -> None:
    one = key()
    (batch,) = push_parts([(one, one.encoder.prepare(gradient(), RAW, 1))], None, 7, True)
    assert [type(part) for part in batch] == [Push, Push]
    first, second = batch
    assert isinstance(first, Push)
    assert isinstance(second, Push)
    assert (first.entry.key, first.entry.chunk, first.entry.round, first.entry.codec) == ("w", 0, 1, "none")
    assert (second.entry.chunk, second.server, second.priority) == (1, one.server(1), 7)
    assert bytes(first.frame) + bytes(second.frame) == gradient().tobytes()
    assert (one.round, one.counters.pushes, one.counters.raw_bytes, one.counters.sent_bytes) == (1, 1, 400, 400)


def test_compressed_push_says_how_it_was_encoded() -> None:
    one = key()
    params = parse_params({"type": "2bit", "threshold": 2.0})
    (batch,) = push_parts([(one, one.encoder.prepare(gradient(), params, 1))], None, 0, True)
    assert [part.entry.meta for part in batch if isinstance(part, Push)] == [{"threshold": 2.0}] * 2
    assert [pushed_bytes(part) for part in batch] == [16, 12]
    assert (one.counters.raw_bytes, one.counters.sent_bytes) == (400, 28)


def test_copy_protects_what_is_sent_from_the_caller() -> None:
    for copy, sent in ((True, 1.0), (False, 5.0)):
        one, values = key("w", 4), np.ones(4, np.float32)
        (batch,) = push_parts([(one, one.encoder.prepare(values, RAW, 1))], None, 0, copy)
        values[:] = 5
        (part,) = batch
        assert isinstance(part, Push)
        assert np.frombuffer(part.frame, np.float32).tolist() == [sent] * 4


def test_pushpull_asks_for_the_round_it_pushes() -> None:
    one = key()
    destination = Destination(one, [])
    (batch,) = push_parts([(one, one.encoder.prepare(gradient(), RAW, 1))], [destination], 3, True)
    pulls = [part for part in batch if isinstance(part, Pull)]
    assert [part.entry for part in pulls] == [ChunkEntry("w", 0, 1, 1), ChunkEntry("w", 1, 1, 1)]
    assert [part.priority for part in pulls] == [3, 3]
    pulls[1].target[:] = np.full(36, 9, np.float32).view(np.uint8)
    assert destination.flat[64:].tolist() == [9.0] * 36
    assert one.counters.pulled_bytes == 400


def test_large_calls_come_in_batches_while_they_are_encoded(monkeypatch: Any) -> None:
    monkeypatch.setattr(dist_exchange, "BATCH_BYTES", 256)
    one, other = key("a", 128), key("b", 64)
    prepared = [(each, each.encoder.prepare(gradient(each.elements), RAW, 1)) for each in (one, other)]
    batches = push_parts(prepared, None, 0, True)
    assert len(next(batches)) == 1
    assert (one.round, other.round) == (1, 0), "the second key is not touched yet"
    rest = list(batches)
    assert [len(batch) for batch in rest] == [1, 1, 0]
    assert other.round == 1


def test_pull_parts() -> None:
    keys = [key("a", 100), key("b", 10)]
    parts = pull_parts(keys, [Destination(one, []) for one in keys], 5)
    assert [(part.entry.key, part.entry.chunk) for part in parts if isinstance(part, Pull)] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
    ]
    assert [pushed_bytes(part) for part in parts] == [0, 0, 0]


def test_results_take_the_form_of_the_call() -> None:
    one, two = key("a", 2), key("b", 2)
    out = np.zeros(2, np.float32)

    def results(named: Any, out_given: Any, outs: list[list[Any]]) -> Any:
        keys = [one, two][: len(outs)]
        destinations = [Destination(each, given) for each, given in zip(keys, outs, strict=True)]
        for destination in destinations:
            destination.flat[:] = 4
        pairs = [(each.key, given) for each, given in zip(keys, outs, strict=True)]
        return finisher(named, out_given, keys, pairs, destinations)()

    assert results("a", None, [[]]).tolist() == [4.0, 4.0]
    assert [value.tolist() for value in results(["a", "b"], None, [[], []])] == [[4.0, 4.0]] * 2
    assert results("a", out, [[out]]) is out
    assert out.tolist() == [4.0, 4.0]
    assert (one.counters.pulls, two.counters.pulls) == (3, 1)
