"""Every message of the protocol goes over the wire and comes back equal; values out of range do not."""

import string
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import messages
from kvstore.errors import ProtocolError
from kvstore.messages import Ack, Barrier, Message, Pull, Register, Role
from kvstore.wire import Wire

TYPES: tuple[type, ...] = typing.get_args(Message)
WIRE = Wire("job")


def values(kind: Any) -> st.SearchStrategy[Any]:
    """A strategy for one msgspec.inspect type: any value the protocol allows."""
    inspect = msgspec.inspect
    if isinstance(kind, inspect.UnionType):
        return st.one_of([values(option) for option in kind.types])
    if isinstance(kind, inspect.IntType):
        least = -(2**31) if kind.ge is None else kind.ge
        return st.integers(least, min(2**62, 2**62 if kind.le is None else kind.le))
    if isinstance(kind, inspect.FloatType):
        return st.floats(0 if kind.ge is not None else None, allow_nan=False, allow_infinity=kind.ge is None)
    if isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        items = st.lists(values(kind.item_type), max_size=3)
        return items.map(tuple) if isinstance(kind, inspect.VarTupleType) else items
    if isinstance(kind, inspect.TupleType):
        return st.tuples(*[values(item) for item in kind.item_types])
    if isinstance(kind, inspect.DictType):
        return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
    if isinstance(kind, inspect.StructType):
        return st.builds(kind.cls, **{field.name: values(field.type) for field in kind.fields})
    if isinstance(kind, inspect.EnumType):
        return st.sampled_from(list(kind.cls))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        inspect.StrType: st.text(string.printable + "äß漢\U0001f600", max_size=12),
        inspect.BoolType: st.booleans(),
        inspect.NoneType: st.none(),
    }
    return plain[type(kind)]


@pytest.mark.parametrize("cls", TYPES, ids=lambda cls: cls.__name__)
def test_every_message_comes_back_equal(cls: type) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(values(msgspec.inspect.type_info(cls)))
    def check(message: Any) -> None:
        back, payload = WIRE.decode(WIRE.encode(message, [b"abc", memoryview(b"")]))
        assert back == message and type(back) is cls
        assert [bytes(frame) for frame in payload] == [b"abc", b""]

    check()


def test_union_holds_every_message_of_the_module() -> None:
    inside = [cls for cls in vars(messages).values() if isinstance(cls, type) and issubclass(cls, messages._Message)]
    assert set(inside) - {messages._Message} == set(TYPES)


def test_tags_are_unique_and_messages_cannot_be_changed() -> None:
    tags = [cls.__struct_config__.tag for cls in TYPES]  # type: ignore[attr-defined]
    assert len(set(tags)) == len(TYPES)
    message = Ack(sequences=[1])
    with pytest.raises(AttributeError):
        message.sequences = []  # type: ignore[misc]


def test_unknown_fields_and_missing_fields_are_refused() -> None:
    body = {"type": "ack", "sequences": [1]}
    assert msgspec.convert(body, Message) == Ack(sequences=[1])
    for wrong in ({**body, "more": 1}, {"type": "ack"}, {"type": "nothing"}, {"sequences": [1]}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, Message)


@pytest.mark.parametrize(
    "message",
    [
        Register(role=Role.WORKER, num_workers=-1, num_servers=1, chunk_elements=64),
        Register(role=Role.WORKER, num_workers=1, num_servers=2**62 + 1, chunk_elements=64),
        Register(role=Role.WORKER, rank=2**20 + 1, num_workers=1, num_servers=1, chunk_elements=64),
        Ack(sequences=[-5]),
        Pull(sequence=1, rank=-1, entries=[], timeout=1.0),
        Barrier(sequence=1, rank=True, turn=0, timeout=1.0),
    ],
    ids=repr,
)
def test_numbers_out_of_range_are_refused(message: Message) -> None:
    with pytest.raises(ProtocolError, match="not a message of this protocol"):
        WIRE.decode(WIRE.encode(message))


@pytest.mark.parametrize("name", ["Barrier", "Agree", "Pull", "Assign", "Declare", "SetOptimizer"])
def test_a_timeout_of_nan_is_refused_because_it_would_never_pass(name: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(getattr(messages, name))}
    assert msgspec.convert(2.5, fields["timeout"]) == 2.5
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(float("nan"), fields["timeout"])


def test_every_message_with_a_timeout_is_in_the_test_above() -> None:
    with_timeout = {cls.__name__ for cls in TYPES if "timeout" in getattr(cls, "__struct_fields__", ())}
    assert with_timeout == {"Barrier", "Agree", "Pull", "Assign", "Declare", "SetOptimizer"}
