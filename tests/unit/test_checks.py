"""The argument checks: what passes unchanged, what is refused, and what the message says (interface R1, §1.3)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import _checks as checks
from llm_datadist._checks import (
    check_dict,
    check_int,
    check_list,
    check_range,
    check_rule,
    check_type,
    check_uint64,
    check_uint64_list,
    is_digits,
)
from llm_datadist.errors import NoneArgument, ParamError

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.covers(
    "check_int32",
    "check_int64",
    "check_uint16",
    "check_uint32",
    "check_uint64",
    "check_uint64_list",
    "check_uint8",
    "errors.ParamError",
)

WIDTHS = {
    "uint64": (0, 2**64 - 1),
    "uint32": (0, 2**32 - 1),
    "uint16": (0, 2**16 - 1),
    "uint8": (0, 2**8 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "int32": (-(2**31), 2**31 - 1),
}


@pytest.mark.parametrize("kind", WIDTHS)
def test_r1_integer_passes_inside_its_width_only_and_all_else_is_named(refused: Callable[..., None], kind: str) -> None:
    check, (low, high) = getattr(checks, f"check_{kind}"), WIDTHS[kind]
    assert [check("n", low), check("n", high), check("n", 5)] == [low, high, 5]
    for value in (low - 1, high + 1):
        refused(ParamError, partial(check, "batch_index", value), "batch_index", str(value), str(high), kind)
    for wrong in ("1", 1.0, [1], 1j, np.float32(1)):
        refused(TypeError, partial(check, "cache_id", wrong), "cache_id", "only support", "int", type(wrong).__name__)
    refused(NoneArgument, partial(check, "cache_id", None), "cache_id")


@pytest.mark.parametrize("value", [True, np.int64(1), np.uint8(1), np.array(1)])
def test_bool_and_index_types_become_plain_ints(value: object) -> None:
    assert (check_uint64("n", value), type(check_uint64("n", value))) == (1, int)


def test_uint64_list_becomes_a_new_list_of_plain_ints() -> None:
    result = check_uint64_list("blocks", (0, True, np.int64(7), 2**64 - 1))
    assert result == [0, 1, 7, 2**64 - 1]
    assert {type(x) for x in result} == {int}


def test_what_is_right_comes_back_as_the_same_object() -> None:
    names, pairs = ["a", "b"], {1: [2]}
    assert check_type("v", names, list) is check_type("v", names, (tuple, list)) is names
    assert check_list("v", names, str) is names
    assert check_list("v", (), str, tuple_ok=True) == ()
    assert check_dict("copies", pairs, int, list) is pairs
    for layers in (range(1), range(3, 9), range(0), range(5, 2)):
        assert check_range("src_layer_range", layers) is layers
    assert check_int("n", -(2**100)) == -(2**100), "it has no width"
    check_rule(True, "never raised")


LISTS = partial(check_list, inner=str)
TUPLES = partial(check_list, inner=str, tuple_ok=True)
PAIRS = partial(check_dict, key=int, inner=list)
NOT_EMPTY = partial(check_range, empty_ok=False)


@pytest.mark.parametrize(
    ("check", "value", "kind", "parts"),
    [
        (
            partial(check_type, types=(list, tuple)),
            "abc",
            TypeError,
            ["v only support [list, tuple] but got str: 'abc'"],
        ),
        (partial(check_type, types=(list, tuple)), None, NoneArgument, ["v"]),
        (check_uint64, np.int64(-1), ParamError, ["v: -1 "]),
        (LISTS, ("a",), TypeError, ["v", "list", "tuple"]),
        (TUPLES, {"a"}, TypeError, ["v", "list, tuple", "set"]),
        (LISTS, None, NoneArgument, ["v", "list"]),
        (LISTS, ["a", 3], TypeError, ["v[1]", "inner type only support", "str", "int: 3"]),
        (LISTS, ["a", None], NoneArgument, ["v[1]", "str"]),
        (check_uint64_list, [1, -1], ParamError, ["v[1]", "-1", "uint64"]),
        (check_uint64_list, [2**64], ParamError, ["v[0]", str(2**64)]),
        (check_uint64_list, [1, 2, 3.0], TypeError, ["v[2]", "float: 3.0"]),
        (check_uint64_list, [None], NoneArgument, ["v[0]"]),
        (check_uint64_list, None, NoneArgument, ["v"]),
        (check_uint64_list, 3, TypeError, ["v", "int: 3"]),
        (partial(check_uint64_list, tuple_ok=False), (1,), TypeError, ["v only support [list] but got tuple"]),
        (PAIRS, None, NoneArgument, ["v"]),
        (PAIRS, [1], TypeError, ["v", "dict", "list"]),
        (PAIRS, {"a": [1]}, TypeError, ["key of v", "int", "'a'"]),
        (PAIRS, {1: (2,)}, TypeError, ["v[1]", "inner type only support", "list", "tuple"]),
        (PAIRS, {1: None}, NoneArgument, ["v[1]", "list"]),
        (check_range, None, NoneArgument, ["v", "range"]),
        (check_range, [0, 1], TypeError, ["v", "range", "list"]),
        (check_range, range(0, 4, 2), ParamError, ["v", "range(0, 4, 2)", "step 2"]),
        (check_range, range(4, 0, -1), ParamError, ["v", "step -1"]),
        (check_range, range(-1, 4), ParamError, ["v", "range(-1, 4)", "starts at -1"]),
        (NOT_EMPTY, range(0), ParamError, ["v: ", "is empty"]),
        (NOT_EMPTY, range(5, 5), ParamError, ["v: ", "is empty"]),
        (NOT_EMPTY, range(5, 2), ParamError, ["v: ", "is empty"]),
    ],
)
def test_r1_the_argument_the_element_and_the_rule_are_named(
    refused: Callable[..., None], check: Callable[[str, Any], Any], value: Any, kind: type[Exception], parts: list[str]
) -> None:
    refused(kind, partial(check, "v", value), *parts)


def test_messages_show_long_values_shortened_and_rules_as_they_are(refused: Callable[..., None]) -> None:
    with pytest.raises(TypeError) as caught:
        check_type("shape", "x" * 10_000, list)
    assert len(str(caught.value)) < 200
    rule = "size: 0 is neither -1 nor above 0"
    refused(ParamError, partial(check_rule, False, rule), rule)


def test_is_digits_allows_one_to_twenty_ascii_digits() -> None:
    assert is_digits("0")
    assert is_digits("18446744073709551615")
    for text in ("9" * 21, "", "-1", "+1", "1.5", " 1", "1_0", "٣", "²"):
        assert not is_digits(text), text
