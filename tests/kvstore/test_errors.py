"""Errors cross the wire and processes whole, and their drawn tree is the real one."""

import pickle
import re

import pytest

from kvstore import errors
from kvstore.errors import KVStoreError, ServerError, from_wire, nearest_first, to_wire


def tree(root: type[KVStoreError]) -> list[type[KVStoreError]]:
    return [root] + [cls for child in root.__subclasses__() for cls in tree(child)]


EVERY = [cls for cls in tree(KVStoreError) if cls.__module__ == "kvstore.errors"]


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_round_trip_over_the_wire_keeps_class_text_and_facts(cls: type[KVStoreError]) -> None:
    error = cls("worker 3 lost", rank=3, role="worker", key="w", age=1.5, nothing=None)
    back = from_wire(*to_wire(error))
    assert type(back) is cls
    assert str(back) == "worker 3 lost" and back.facts == error.facts
    assert back.rank == 3 and back.role == "worker" and back.key == "w"


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_survives_the_pickling_that_user_programs_do(cls: type[KVStoreError]) -> None:
    back = pickle.loads(pickle.dumps(cls("text", rank=1)))  # noqa: S301 (own data; multiprocessing does it)
    assert type(back) is cls and back.text == "text" and back.rank == 1


def test_docstring_draws_every_class_under_its_parent() -> None:
    drawn = re.findall(r"^    ((?:│   |    )*)(?:[├└]── )?(\w+Error)\b", errors.__doc__ or "", re.M)
    depth = {name: len(indent) // 4 for indent, name in drawn}
    assert set(depth) == {cls.__name__ for cls in EVERY}
    parents = [name for _, name in drawn]
    for cls in EVERY[1:]:
        above = parents[: parents.index(cls.__name__)]
        nearest = [name for name in above if depth[name] < depth[cls.__name__] or name == "KVStoreError"]
        expected = nearest[-1] if depth[cls.__name__] else "KVStoreError"
        assert issubclass(cls, getattr(errors, expected)), cls


def test_foreign_exception_travels_as_server_error() -> None:
    name, text, facts = to_wire(ZeroDivisionError("division by zero"))
    back = from_wire(name, text, facts)
    assert type(back) is ServerError and "ZeroDivisionError: division by zero" in str(back)


@pytest.mark.parametrize("name", ["SystemExit", "os.system", "", "__import__", "object"])
def test_unknown_class_name_from_the_wire_becomes_server_error(name: str) -> None:
    assert type(from_wire(name, "x", {})) is ServerError


@pytest.mark.parametrize(
    "fact", ["text", "facts", "self", "__class__", "__reduce__", "args", "with_traceback", "a-b", ""]
)
def test_facts_from_the_wire_cannot_replace_what_the_error_is(fact: str) -> None:
    error = from_wire("JoinError", "real text", {fact: "hostile", "rank": 2})
    assert error.rank == 2 and error.text == "real text" and type(error).__name__ == "JoinError"
    assert error.args == ("real text",) and callable(error.with_traceback) and "hostile" not in str(error)


def test_attributes_that_were_not_given_read_as_none() -> None:
    error = KVStoreError("x")
    assert (error.key, error.rank, error.role, error.address) == (None, None, None, None)


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [("OperationTimeoutError", TimeoutError), ("PeerLostError", ConnectionError), ("ConfigError", ValueError),
     ("KeyNotInitializedError", LookupError), ("NotSupportedError", NotImplementedError)],
)  # fmt: skip
def test_errors_can_be_caught_as_the_builtin_they_resemble(cls: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(errors, cls), builtin)


def test_nearest_name_comes_first() -> None:
    assert nearest_first("2bitt", ["topk", "2bit", "qsgd"])[0] == "2bit"
    assert nearest_first("TOPK", ["2bit", "topk"])[0] == "topk"
