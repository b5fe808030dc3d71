"""The argument checks: what passes unchanged, what is refused, and what the message says (interface R1, §1.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from llm_datadist.errors import LLMException, LLMStatusCode, NoneArgument, ParamError

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
INTEGER_CHECKS: dict[str, Callable[[str, object], int]] = {k: getattr(checks, f"check_{k}") for k in WIDTHS}


@pytest.mark.parametrize("kind", WIDTHS)
def test_integer_inside_its_width_passes(kind: str) -> None:
    check, (low, high) = INTEGER_CHECKS[kind], WIDTHS[kind]
    assert [check("n", low), check("n", high), check("n", 5)] == [low, high, 5]


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("side", [0, 1])
def test_r1_integer_outside_its_width_is_param_error_and_value_error(kind: str, side: int) -> None:
    value = (WIDTHS[kind][0] - 1, WIDTHS[kind][1] + 1)[side]
    with pytest.raises(ParamError) as caught:
        INTEGER_CHECKS[kind]("batch_index", value)
    assert isinstance(caught.value, ValueError)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert all(part in str(caught.value) for part in ("batch_index", str(value), str(WIDTHS[kind][1]), kind))


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("value", ["1", 1.0, [1], 1j, np.float32(1)])
def test_r1_wrong_type_is_type_error_naming_argument_type_and_what_is_allowed(kind: str, value: object) -> None:
    with pytest.raises(TypeError) as caught:
        INTEGER_CHECKS[kind]("cache_id", value)
    assert not isinstance(caught.value, LLMException)
    assert all(part in str(caught.value) for part in ("cache_id", "only support", "int", type(value).__name__))


@pytest.mark.parametrize("kind", WIDTHS)
def test_r1_none_is_type_error_and_attribute_error(kind: str) -> None:
    with pytest.raises(NoneArgument, match="cache_id") as caught:
        INTEGER_CHECKS[kind]("cache_id", None)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, AttributeError)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize("value", [True, np.int64(1), np.uint8(1), np.array(1)])
def test_bool_and_index_types_become_plain_ints(value: object) -> None:
    result = check_uint64("n", value)
    assert result == 1
    assert type(result) is int


def test_numpy_integer_outside_the_width_is_refused() -> None:
    with pytest.raises(ParamError, match=r"n: -1 "):
        check_uint64("n", np.int64(-1))


def test_check_int_has_no_width() -> None:
    assert check_int("n", -(2**100)) == -(2**100)


def test_check_type_returns_the_same_object() -> None:
    value = ["a"]
    assert check_type("v", value, list) is value
    assert check_type("v", value, (tuple, list)) is value


def test_check_type_names_every_allowed_type() -> None:
    with pytest.raises(TypeError, match=r"shape only support \[list, tuple\] but got str: 'abc'"):
        check_type("shape", "abc", (list, tuple))
    with pytest.raises(NoneArgument, match="shape"):
        check_type("shape", None, (list, tuple))


def test_messages_show_long_values_shortened() -> None:
    with pytest.raises(TypeError) as caught:
        check_type("shape", "x" * 10_000, list)
    assert len(str(caught.value)) < 200


def test_check_list_returns_the_same_list() -> None:
    value = ["a", "b"]
    assert check_list("v", value, str) is value
    assert check_list("v", (), str, tuple_ok=True) == ()


@pytest.mark.parametrize(
    ("value", "tuple_ok", "kind", "parts"),
    [
        (("a",), False, TypeError, ("keys", "list", "tuple")),
        ({"a"}, True, TypeError, ("keys", "list, tuple", "set")),
        (None, False, NoneArgument, ("keys", "list")),
        (["a", 3], False, TypeError, ("keys[1]", "inner type only support", "str", "int: 3")),
        (["a", None], False, NoneArgument, ("keys[1]", "str")),
    ],
)
def test_r1_check_list_names_the_container_or_the_element(
    value: object, tuple_ok: bool, kind: type[Exception], parts: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        check_list("keys", value, str, tuple_ok=tuple_ok)
    assert all(part in str(caught.value) for part in parts)


def test_check_uint64_list_returns_new_plain_ints() -> None:
    given = (0, True, np.int64(7), 2**64 - 1)
    result = check_uint64_list("blocks", given)
    assert result == [0, 1, 7, 2**64 - 1]
    assert {type(x) for x in result} == {int}


@pytest.mark.parametrize(
    ("value", "kind", "parts"),
    [
        ([1, -1], ParamError, ("blocks[1]", "-1", "uint64")),
        ([2**64], ParamError, ("blocks[0]", str(2**64))),
        ([1, 2, 3.0], TypeError, ("blocks[2]", "float: 3.0")),
        ([None], NoneArgument, ("blocks[0]",)),
        (None, NoneArgument, ("blocks",)),
        (3, TypeError, ("blocks", "int: 3")),
    ],
)
def test_r1_check_uint64_list_names_the_element(value: object, kind: type[Exception], parts: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        check_uint64_list("blocks", value)
    assert all(part in str(caught.value) for part in parts)


def test_check_uint64_list_can_refuse_tuples() -> None:
    with pytest.raises(TypeError, match=r"addrs only support \[list\] but got tuple"):
        check_uint64_list("addrs", (1,), tuple_ok=False)


@pytest.mark.parametrize(
    ("value", "kind", "parts"),
    [
        (None, NoneArgument, ("copies",)),
        ([1], TypeError, ("copies", "dict", "list")),
        ({"a": [1]}, TypeError, ("key of copies", "int", "'a'")),
        ({1: (2,)}, TypeError, ("copies[1]", "inner type only support", "list", "tuple")),
        ({1: None}, NoneArgument, ("copies[1]", "list")),
    ],
)
def test_r1_check_dict_names_key_or_value(value: object, kind: type[Exception], parts: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        check_dict("copies", value, int, list)
    assert all(part in str(caught.value) for part in parts)


def test_check_dict_returns_the_same_dict() -> None:
    value = {1: [2]}
    assert check_dict("copies", value, int, list) is value


@pytest.mark.parametrize("value", [range(1), range(3, 9), range(0), range(5, 2)])
def test_check_range_passes_layer_ranges(value: range) -> None:
    assert check_range("src_layer_range", value) is value


@pytest.mark.parametrize(
    ("value", "kind", "parts"),
    [
        (None, NoneArgument, ("src_layer_range", "range")),
        ([0, 1], TypeError, ("src_layer_range", "range", "list")),
        (range(0, 4, 2), ParamError, ("src_layer_range", "range(0, 4, 2)", "step 2")),
        (range(4, 0, -1), ParamError, ("src_layer_range", "step -1")),
        (range(-1, 4), ParamError, ("src_layer_range", "range(-1, 4)", "starts at -1")),
    ],
)
def test_r1_check_range_names_the_broken_rule(value: object, kind: type[Exception], parts: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        check_range("src_layer_range", value)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize("value", [range(0), range(5, 5), range(5, 2)])
def test_check_range_can_refuse_empty_ranges(value: range) -> None:
    with pytest.raises(ParamError, match=r"src_layer_range: .* is empty"):
        check_range("src_layer_range", value, empty_ok=False)


def test_check_rule() -> None:
    check_rule(True, "never raised")
    with pytest.raises(ParamError, match="size: 0 is neither -1 nor above 0") as caught:
        check_rule(False, "size: 0 is neither -1 nor above 0")
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize(("text", "digits"), [("0", True), ("18446744073709551615", True), ("9" * 21, False)])
def test_is_digits_allows_every_width(text: str, digits: bool) -> None:
    assert is_digits(text) is digits


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.5", " 1", "1_0", "٣", "²"])
def test_is_digits_wants_ascii_digits_only(text: str) -> None:
    assert not is_digits(text)
