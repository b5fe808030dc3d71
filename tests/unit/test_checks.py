"""The argument checks: what passes unchanged, and what only these functions reach (interface R1, §1.3).

What they refuse, and what the message says: the tables of tests/api/test_bad_input_calls.py and its kin.
"""

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


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        ("uint64", 0, 2**64 - 1),
        ("uint32", 0, 2**32 - 1),
        ("uint16", 0, 2**16 - 1),
        ("uint8", 0, 2**8 - 1),
        ("int64", -(2**63), 2**63 - 1),
        ("int32", -(2**31), 2**31 - 1),
    ],
)
def test_r1_integer_passes_inside_its_width_only(refused: Callable[..., None], kind: str, low: int, high: int) -> None:
    check = getattr(checks, f"check_{kind}")
    assert [check("n", low), check("n", high), check("n", 5)] == [low, high, 5]
    for value in (low - 1, high + 1):
        refused(ParamError, partial(check, "batch_index", value), "batch_index", str(value), str(high), kind)
    for wrong in (1j, np.float32(1)):
        refused(TypeError, partial(check, "cache_id", wrong), "cache_id", "only support", "int", type(wrong).__name__)


def test_bool_and_index_types_become_plain_ints(refused: Callable[..., None]) -> None:
    numbers: list[Any] = [True, np.int64(1), np.uint8(1), np.array(1)]
    for result in ([check_uint64("n", value) for value in numbers], check_uint64_list("n", tuple(numbers))):
        assert result == [1] * 4
        assert {type(number) for number in result} == {int}
    refused(ParamError, partial(check_uint64, "n", np.int64(-1)), "n: -1 ")


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


def test_every_allowed_type_and_the_element_are_named_and_long_values_shortened(refused: Callable[..., None]) -> None:
    types = partial(check_type, types=(list, tuple))
    refused(TypeError, partial(types, "v", "abc"), "v only support [list, tuple] but got str: 'abc'")
    refused(TypeError, partial(check_list, "v", {"a"}, str, tuple_ok=True), "v only support [list, tuple] but got set")
    refused(TypeError, partial(check_list, "v", ["a", 3], str), "v[1] inner type only support [str] but got int: 3")
    refused(NoneArgument, partial(check_list, "v", ["a", None], str), "v[1] inner type only support [str]")
    refused(TypeError, partial(check_dict, "v", {1: (2,)}, int, list), "v[1] inner type only support [list]", "tuple")
    refused(NoneArgument, partial(check_dict, "v", {1: None}, int, list), "v[1]", "list")
    refused(ParamError, partial(check_range, "v", range(-1, 4)), "v", "range(-1, 4)", "starts at -1")
    for empty in (range(0), range(5, 5), range(5, 2)):
        refused(ParamError, partial(check_range, "v", empty, empty_ok=False), "v: ", "is empty")
    with pytest.raises(TypeError) as caught:
        check_type("shape", "x" * 10_000, list)
    assert len(str(caught.value)) < 200


def test_is_digits_allows_one_to_twenty_ascii_digits() -> None:
    assert is_digits("0")
    assert is_digits("18446744073709551615")
    for text in ("9" * 21, "", "-1", "+1", "1.5", " 1", "1_0", "٣", "²"):
        assert not is_digits(text), text
