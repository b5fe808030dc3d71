"""Helpers that code for the original imports: every rule of interface §1.3 that says something about them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist.errors import LLMException, LLMStatusCode, NoneArgument, ParamError
from llm_datadist.status import handle_llm_status, raise_if_false, raise_if_true
from llm_datadist.utils import utils
from llm_datadist.utils.utils import check_dict, check_isinstance, check_positive_or_set_default
from llm_datadist.v2.llm_types import check_layer_range
from llm_datadist.v2.llm_utils import layer_range_to_tensor_indices

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.covers("compat: *")

INVALID = LLMStatusCode.LLM_PARAM_INVALID
TIMEOUT = LLMStatusCode.LLM_TIMEOUT


# --- statuses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "bad", "good"), [(raise_if_false, False, 1), (raise_if_true, [0], ())])
@pytest.mark.parametrize(
    ("fmt", "args", "text"),
    [
        ("size is wrong", (), "size is wrong"),
        ("size %d is not %s", (3, "even"), "size 3 is not even"),
        ("size {} is not {}", (3, "even"), "size 3 is not even"),
        ("100% of {x", (), "100% of {x"),
        ("size %d %d", (3,), "size %d %d (3,)"),
        ("{} {}", (3,), "{} {} (3,)"),
    ],
)
def test_raise_if_logs_and_raises_its_text(
    function: Callable[..., None],
    bad: object,
    good: object,
    fmt: str,
    args: tuple[object, ...],
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    function(good, fmt, *args)
    assert caplog.records == []
    with pytest.raises(ParamError) as caught:
        function(bad, fmt, *args)
    assert (str(caught.value), caught.value.status_code) == (text, INVALID)
    assert [(each.levelno, each.getMessage(), each.pathname) for each in caplog.records] == [
        (logging.ERROR, text, __file__)
    ]


def test_raise_if_carries_the_status_it_was_given() -> None:
    for function, bad in ((raise_if_false, False), (raise_if_true, True)):
        with pytest.raises(LLMException) as caught:
            function(bad, "too late", status_code=TIMEOUT)
        assert caught.value.status_code is TIMEOUT


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (TIMEOUT, TIMEOUT),
        (int(TIMEOUT), TIMEOUT),
        (INVALID, INVALID),
        (-1, LLMStatusCode.LLM_UNKNOWN_ERROR),
        (12345, LLMStatusCode.LLM_FAILED),
        (0x5010B014, LLMStatusCode.LLM_FAILED),
    ],
)
def test_handle_llm_status_raises_with_function_status_and_info(status: int, code: LLMStatusCode) -> None:
    for success in (0, LLMStatusCode.LLM_SUCCESS):
        handle_llm_status(success, "[pull_cache]", "key=1")
    with pytest.raises(LLMException, match=r"\[pull_cache\] .*key=1") as caught:
        handle_llm_status(status, "[pull_cache]", "key=1")
    assert caught.value.status_code is code
    assert code.name in str(caught.value)


@pytest.mark.parametrize(("status", "kind"), [(None, NoneArgument), ("0", TypeError), (0.0, TypeError)])
def test_r01_handle_llm_status_refuses_what_is_no_status(status: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="status"):
        handle_llm_status(status, "[f]")


# --- check_isinstance ------------------------------------------------------------------------------------------------


def test_check_isinstance_passes() -> None:
    cases: list[tuple[object, Any, Any]] = [
        (None, int, None),  # None passes unless told otherwise
        (None, [list, tuple], int),
        (True, int, None),
        (3, (int, str), None),
        ("a", [int, str], None),
        ([1, True], [list, tuple], int),
        ((), [list, tuple], int),
        ({1: "x"}, dict, int),
    ]
    for value, types, inner in cases:
        check_isinstance("batch", value, types, inner)


@pytest.mark.parametrize(
    ("value", "types", "inner", "text"),
    [
        (1.5, int, None, r"batch only support \[int\] but got float"),
        ("1", [int, list], None, r"batch only support \[int, list\] but got str"),
        ([1, "2"], list, int, r"batch inner type only support \[int\] but got str"),
        ([1, None], list, int, r"batch inner type only support \[int\] but got NoneType"),
        ({"a": 1}, dict, [int], r"batch inner type only support \[int\] but got str"),
    ],
)
def test_r01_check_isinstance_names_argument_rule_and_type(value: object, types: Any, inner: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        check_isinstance("batch", value, types, inner)
    with pytest.raises(TypeError, match=f"pull_cache: {text}"):
        check_isinstance("batch", value, types, inner, "pull_cache: ")
    with pytest.raises(NoneArgument, match=r"batch only support \[int\] but got NoneType"):
        check_isinstance("batch", None, int, allow_none=False)


# --- the others ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "inner", "kind", "text"),
    [
        (None, None, NoneArgument, "copies only support"),
        ([1], None, TypeError, "copies only support .dict. but got list"),
        ({"a": [1]}, None, TypeError, "copies inner type only support .int. but got str"),
        ({1: 2}, None, TypeError, r"copies\[1\] only support .list. but got int"),
        ({1: None}, None, NoneArgument, r"copies\[1\] only support"),
        ({1: ["2"]}, int, TypeError, r"copies\[1\] inner type only support .int. but got str"),
    ],
)
def test_r01_check_dict_refuses(value: object, inner: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        check_dict("copies", value, int, list, inner)
    check_dict("copies", {1: [2]}, int, list, inner)


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
def test_r01_check_list_checks_every_element(kind: str, low: int, high: int) -> None:
    check = getattr(utils, f"check_list_{kind}")
    check("ids", [low, high])
    check("ids", (True,))
    for value in (low - 1, high + 1):
        with pytest.raises(ValueError, match=rf"ids\[1\].*{kind}"):
            check("ids", [low, value])
    with pytest.raises(TypeError, match=r"ids\[0\]"):
        check("ids", ["1"])
    with pytest.raises(NoneArgument, match=r"ids\[0\]"):
        check("ids", [None])
    with pytest.raises(TypeError, match="ids only support"):
        check("ids", 3)


def test_r01_check_positive_or_set_default() -> None:
    assert [check_positive_or_set_default("offset", value) for value in (None, 0, 7)] == [-1, 0, 7]
    with pytest.raises(ValueError, match="offset: -1 is negative"):
        check_positive_or_set_default("offset", -1)
    with pytest.raises(TypeError, match="offset"):
        check_positive_or_set_default("offset", "1")


def test_r01_check_layer_range_refuses() -> None:
    check_layer_range("src_layer_range", range(1, 3))
    cases: list[tuple[object, type[Exception]]] = [
        (None, NoneArgument),
        ([0, 1], TypeError),
        (range(2, 2), ParamError),
        (range(3, 1), ParamError),
        (range(0, 4, 2), ParamError),
        (range(-1, 2), ParamError),
    ]
    for value, kind in cases:
        with pytest.raises(kind, match="src_layer_range"):
            check_layer_range("src_layer_range", value)


def test_layer_range_to_tensor_indices() -> None:
    for layers, per_layer, tensors in (
        (range(2), 2, [0, 1, 2, 3]),
        (range(1, 2), 2, [2, 3]),
        (range(1, 3), 3, [3, 4, 5, 6, 7, 8]),
        (range(4, 5), 1, [4]),
        (range(0), 2, []),
        (range(5, 2), 2, []),
    ):
        assert layer_range_to_tensor_indices(layers, per_layer) == tensors


def test_r01_layer_range_to_tensor_indices_refuses() -> None:
    cases: list[tuple[tuple[Any, ...], type[Exception]]] = [
        ((None,), NoneArgument),
        (([0],), TypeError),
        ((range(0, 4, 2),), ParamError),
        ((range(1), 0), ParamError),
        ((range(1), -1), ParamError),
        ((range(1), None), NoneArgument),
    ]
    for arguments, kind in cases:
        with pytest.raises(kind):
            layer_range_to_tensor_indices(*arguments)
