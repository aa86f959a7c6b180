"""What a key, a list or mapping of keys, and their values may be."""

from typing import Any

import numpy as np
import pytest

from kvstore.errors import ArrayError, ParameterError
from kvstore.keys import check_key, keys_of, mirrored, pair_outs, pair_values

A, B = np.zeros(2), np.ones(2)


@pytest.mark.parametrize("key", [0, -1, 2**63 - 1, -(2**63), "", "a/b", "x" * 1024, "ключ", "🗝"])
def test_keys_are_kept_as_they_are(key: int | str) -> None:
    assert check_key(key) == key
    assert type(check_key(key)) is type(key)


def test_numpy_integers_and_strings_become_plain_ones() -> None:
    assert type(check_key(np.int64(7))) is int
    assert type(check_key(np.str_("w"))) is str


@pytest.mark.parametrize("key", [True, np.True_, 1.0, None, b"w", (1, 2), 2**63, -(2**63) - 1, "\ud800"])
def test_what_is_no_key_is_refused(key: object) -> None:
    with pytest.raises(ParameterError, match="cannot be a key"):
        check_key(key)


def test_the_refusal_of_a_wide_integer_names_the_range() -> None:
    with pytest.raises(ParameterError, match=r"-9223372036854775808 to 9223372036854775807"):
        check_key(2**64)


def test_lists_may_mix_types_but_not_repeat() -> None:
    assert keys_of([1, "x"]) == [1, "x"]
    assert keys_of((3, "3")) == [3, "3"]
    assert keys_of({"a": 1}.keys()) == ["a"]
    with pytest.raises(ParameterError, match="'x' occurs twice"):
        keys_of(["x", 1, "x"])


def test_values_are_paired_with_keys() -> None:
    assert _plain(pair_values("w", A, "push")) == [("w", [id(A)])]
    assert _plain(pair_values("w", [A, B], "push")) == [("w", [id(A), id(B)])]
    assert _plain(pair_values(["w", 3], [A, [A, B]], "push")) == [("w", [id(A)]), (3, [id(A), id(B)])]
    assert _plain(pair_values({"w": A, 3: [B]}, None, "push")) == [("w", [id(A)]), (3, [id(B)])]
    assert pair_values([], [], "push") == []


def test_numbers_are_one_array() -> None:
    assert pair_values("w", 1.5, "push") == [("w", [1.5])]
    assert pair_values("w", [1, 2], "push") == [("w", [[1, 2]])]
    assert pair_values(["w"], [[1, 2]], "push") == [("w", [[1, 2]])]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("w", None, "nothing given for key 'w'"),
        ("w", [], "empty"),
        ("w", [A, 1.0], "mixes"),
        (["v", "w"], A, "2 keys need a list of 2 values"),
        (["v", "w"], [A], "2 keys, but 1 values"),
        (["w"], [A, B], "1 keys, but 2 values"),
        ({"w": A}, A, "holds the values already"),
    ],
)
def test_values_that_do_not_pair_are_refused(key: Any, value: Any, text: str) -> None:
    with pytest.raises(ArrayError, match=f"push.*{text}"):
        pair_values(key, value, "push")


def test_outs_are_paired_with_keys() -> None:
    assert pair_outs(["v", "w"], None, "pull") == [("v", []), ("w", [])]
    assert _plain(pair_outs("w", A, "pull")) == [("w", [id(A)])]
    assert _plain(pair_outs("w", [A, B], "pull")) == [("w", [id(A), id(B)])]
    assert _plain(pair_outs(["v", "w"], [A, B], "pull")) == [("v", [id(A)]), ("w", [id(B)])]
    assert _plain(pair_outs({"v": 0, "w": 0}, {"w": B, "v": A}, "pull")) == [("v", [id(A)]), ("w", [id(B)])]
    with pytest.raises(ArrayError, match="'w'"):
        pair_outs(["v", "w"], [A, None], "pull")
    with pytest.raises(ArrayError, match="give the same"):
        pair_outs(["v", "w"], {"w": B}, "pull")


def test_results_mirror_the_form_of_the_keys() -> None:
    assert mirrored("w", [1]) == 1
    assert mirrored(["w"], [1]) == [1]
    assert mirrored({"v": A, "w": B}, [1, 2]) == {"v": 1, "w": 2}
    assert mirrored([], []) == []


def _plain(pairs: list[tuple[int | str, list[Any]]]) -> list[tuple[int | str, list[int]]]:
    return [(key, [id(array) for array in arrays]) for key, arrays in pairs]


def test_long_keys() -> None:
    assert check_key("é" * 1024) == "é" * 1024
    with pytest.raises(ParameterError, match="2049 bytes"):
        check_key("x" + "é" * 1024)
