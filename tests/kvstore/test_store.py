"""The interface that every store implements."""

import inspect
from typing import Any

import pytest

from kvstore.errors import NotSupportedError
from kvstore.local import LocalStore
from kvstore.store import KVStore

PUBLIC = [name for name in vars(KVStore) if not name.startswith("_")]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_call_says_what_it_does_and_is_annotated(name: str) -> None:
    call = vars(KVStore)[name]
    function = call.fget if isinstance(call, property) else call
    assert function is not None
    assert inspect.getdoc(call)
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    annotations = [one.annotation for one in signature.parameters.values() if one.name != "self"]
    assert inspect.Parameter.empty not in annotations


@pytest.mark.parametrize("name", PUBLIC)
def test_stores_take_what_the_interface_says(name: str) -> None:
    said, done = vars(KVStore)[name], getattr(LocalStore, name)
    if isinstance(said, property):
        assert isinstance(done, property)
    else:
        assert inspect.signature(done).parameters == inspect.signature(said).parameters


def test_an_incomplete_store_cannot_be_made() -> None:
    class Half(KVStore):
        """Lacks everything."""

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]


def test_the_end_of_a_with_block_closes_the_store_also_on_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(LocalStore, "close", lambda self: closed.append(self))
    with pytest.raises(ZeroDivisionError), LocalStore() as kv:
        _ = 1 // 0
    assert closed == [kv]


def test_row_sparse_pull_is_refused_by_every_store_that_does_not_offer_it() -> None:
    with pytest.raises(NotSupportedError, match="'local'"):
        LocalStore().row_sparse_pull("w")
