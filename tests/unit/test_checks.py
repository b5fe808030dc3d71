"""The argument checks, ours and those that code for the original imports (interface R1, §1.3).

What ours refuse in every call: the tables of tests/api/test_bad_input_calls.py and its kin.
"""

import logging
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from llm_datadist import _checks as checks
from llm_datadist._transfer.arguments import ARGUMENTS, check
from llm_datadist.errors import LLMException, LLMStatusCode, NoneArgument, ParamError
from llm_datadist.status import handle_llm_status, raise_if_false, raise_if_true
from llm_datadist.utils import utils
from llm_datadist.utils.utils import check_dict, check_isinstance, check_positive_or_set_default
from llm_datadist.v2.llm_types import check_layer_range
from llm_datadist.v2.llm_utils import layer_range_to_tensor_indices
from tests.support.refusals import NONE, RULE, TYPE, Spec, bad, integer, refuse_each
from tests.support.source import ROOT

pytestmark = pytest.mark.covers("compat: *", "errors.ParamError")


def test_r01_integer_passes_inside_its_width_only_alone_and_in_a_list() -> None:
    widths = {f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)}
    widths |= {f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (32, 64)}
    for kind, (low, high) in widths.items():
        check_one, check_each = getattr(checks, f"check_{kind}"), getattr(utils, f"check_list_{kind}")
        assert [check_one("n", number) for number in (low, high, 5)] == [low, high, 5]
        check_each("ids", [low, high])
        check_each("ids", (True,))
        rows = [bad(RULE, f"n: {value} ", str(high), kind, n=value) for value in (low - 1, high + 1)]
        rows += [bad(TYPE, "n only support [int]", type(value).__name__, n=value) for value in (1j, np.float32(1))]
        refuse_each(partial(_named, check_one), {}, {"n": integer(low, high)}, *rows)
        outside = [(RULE, f"ids[1]: {value} ", [low, value]) for value in (low - 1, high + 1)]
        in_lists = Spec((3, {1}), (TYPE, "{}[0]", ["1"]), (NONE, "{}[0]", [None]), *outside)
        refuse_each(partial(_named, check_each), {}, {"ids": in_lists})


def _named(check: Callable[..., object], *more: object, **given: object) -> None:
    """Check the one argument under its name."""
    for name, value in given.items():
        check(name, value, *more)


def test_bool_and_index_types_become_plain_ints() -> None:
    numbers: list[Any] = [True, np.int64(1), np.uint8(1), np.array(1)]
    for result in (
        [checks.check_uint64("n", value) for value in numbers],
        checks.check_uint64_list("n", tuple(numbers)),
    ):
        assert result == [1] * 4
        assert {type(number) for number in result} == {int}
    with pytest.raises(ParamError, match=r"^n: -1 "):
        checks.check_uint64("n", np.int64(-1))


def test_every_allowed_type_and_the_element_are_named_and_long_values_shortened() -> None:
    lists, names = partial(checks.check_type, types=(list, tuple)), partial(checks.check_list, inner=str)
    refuse_each(partial(_named, lists), {}, {}, bad(TYPE, "v only support [list, tuple] but got str: 'abc'", v="abc"))
    refuse_each(partial(_named, names), {}, {}, bad(TYPE, "v only support [list, tuple] but got set", v={"a"}))
    rows = (
        bad(TYPE, "v[1] inner type only support [str] but got int: 3", v=["a", 3]),
        bad(NONE, "v[1] inner type only support [str]", v=["a", None]),
    )
    refuse_each(partial(_named, names), {}, {}, *rows)
    pairs = Spec((), (TYPE, "v[1] inner type only support [list] but got tuple", {1: (2,)}), (NONE, "v[1]", {1: None}))
    refuse_each(partial(_named, checks.check_dict, int, list), {}, {"v": pairs})
    ranges = Spec(([0],), (RULE, "range(-1, 4) starts at -1", range(-1, 4)))
    refuse_each(partial(_named, checks.check_range), {}, {"v": ranges})
    with pytest.raises(TypeError) as caught:
        checks.check_type("shape", "x" * 10_000, list)
    assert len(str(caught.value)) < 200


def test_arguments_are_checked_by_name_in_the_order_given() -> None:
    assert check(ARGUMENTS, offset=3, batch_index=0, req_id=None, src_cache_offset=None) == [3, 0, None, 0]
    with pytest.raises(ParamError, match=r"^batch_index: -1 is outside"):
        check(ARGUMENTS, offset=3, batch_index=-1, size="not reached")
    with pytest.raises(NoneArgument, match=r"^cache only support \[Cache\] but got None"):
        check(ARGUMENTS, cache=None, batch_index=-1)


def test_is_digits_allows_one_to_twenty_ascii_digits() -> None:
    assert checks.is_digits("0")
    assert checks.is_digits("18446744073709551615")
    for text in ("9" * 21, "", "-1", "+1", "1.5", " 1", "1_0", "٣", "²"):
        assert not checks.is_digits(text), text


# --- what code for the original imports ----------------------------------------------------------------------------

INVALID = LLMStatusCode.LLM_PARAM_INVALID
TIMEOUT = LLMStatusCode.LLM_TIMEOUT


@pytest.mark.parametrize(("function", "bad", "good"), [(raise_if_false, False, 1), (raise_if_true, [0], ())])
def test_raise_if_logs_and_raises_its_text(
    function: Callable[..., None], bad: object, good: object, caplog: pytest.LogCaptureFixture
) -> None:
    cases: list[tuple[str, tuple[object, ...], str]] = [
        ("size is wrong", (), "size is wrong"),
        ("size %d is not %s", (3, "even"), "size 3 is not even"),
        ("size {} is not {}", (3, "even"), "size 3 is not even"),
        ("100% of {x", (), "100% of {x"),
        ("size %d %d", (3,), "size %d %d (3,)"),
        ("{} {}", (3,), "{} {} (3,)"),
    ]
    for fmt, args, text in cases:
        caplog.clear()
        function(good, fmt, *args)
        assert caplog.records == []
        with pytest.raises(ParamError) as caught:
            function(bad, fmt, *args)
        assert (str(caught.value), caught.value.status_code) == (text, INVALID)
        record = caplog.records[0]
        assert (record.levelno, record.getMessage(), record.pathname) == (logging.ERROR, text, __file__)
    with pytest.raises(LLMException) as other:
        function(bad, "too late", status_code=TIMEOUT)
    assert other.value.status_code is TIMEOUT


def test_r01_handle_llm_status_raises_with_function_status_and_info() -> None:
    codes = {TIMEOUT: TIMEOUT, INVALID: INVALID, -1: LLMStatusCode.LLM_UNKNOWN_ERROR, 12345: LLMStatusCode.LLM_FAILED}
    for status, code in (*codes.items(), (int(TIMEOUT), TIMEOUT)):
        with pytest.raises(LLMException, match=rf"\[pull_cache\] .*{code.name}.*key=1") as caught:
            handle_llm_status(status, "[pull_cache]", "key=1")
        assert caught.value.status_code is code
    for success in (0, LLMStatusCode.LLM_SUCCESS):
        handle_llm_status(success, "[pull_cache]", "key=1")
    refuse_each(handle_llm_status, {"func_name": "[f]"}, {"status": Spec(("0", 0.0))})


def test_r01_check_isinstance_names_argument_rule_and_type() -> None:
    good: list[tuple[object, Any, Any]] = [
        (None, int, None),  # None passes unless told otherwise
        (None, [list, tuple], int),
        (True, int, None),
        (3, (int, str), None),
        ("a", [int, str], None),
        ([1, True], [list, tuple], int),
        ((), [list, tuple], int),
        ({1: "x"}, dict, int),
    ]
    for value, types, inner in good:
        check_isinstance("batch", value, types, inner)
    wrong: list[tuple[object, Any, Any, str]] = [
        (1.5, int, None, r"batch only support \[int\] but got float"),
        ("1", [int, list], None, r"batch only support \[int, list\] but got str"),
        ([1, "2"], list, int, r"batch inner type only support \[int\] but got str"),
        ([1, None], list, int, r"batch inner type only support \[int\] but got NoneType"),
        ({"a": 1}, dict, [int], r"batch inner type only support \[int\] but got str"),
    ]
    for value, types, inner, text in wrong:
        with pytest.raises(TypeError, match=f"^{text}"):
            check_isinstance("batch", value, types, inner)
        with pytest.raises(TypeError, match=f"^pull_cache: {text}"):
            check_isinstance("batch", value, types, inner, "pull_cache: ")
    with pytest.raises(NoneArgument, match=r"batch only support \[int\] but got NoneType"):
        check_isinstance("batch", None, int, allow_none=False)


def test_r01_check_dict_refuses() -> None:
    pairs = Spec(
        ([1],),
        (TYPE, "{} inner type only support [int] but got str", {"a": [1]}),
        (TYPE, "{}[1] only support [list] but got int", {1: 2}),
        (NONE, "{}[1] only support", {1: None}),
    )
    refuse_each(partial(_named, check_dict, int, list), {}, {"copies": pairs})
    inner = bad(TYPE, "copies[1] inner type only support [int] but got str", copies={1: ["2"]})
    refuse_each(partial(_named, check_dict, int, list, int), {}, {}, inner)
    check_dict("copies", {1: [2]}, int, list, int)
    check_dict("copies", {1: ["2"]}, int, list)


def test_r01_check_positive_or_set_default() -> None:
    assert [check_positive_or_set_default("offset", value) for value in (None, 0, 7)] == [-1, 0, 7]
    offset = Spec(("1",), (RULE, "offset: -1 is negative", -1), none_ok=True)
    refuse_each(partial(_named, check_positive_or_set_default), {}, {"offset": offset})


def test_r01_layer_ranges_and_the_indices_of_their_tensors() -> None:
    check_layer_range("src_layer_range", range(1, 3))
    no_range = Spec(([0, 1],), (RULE, "step 2", range(0, 4, 2)), (RULE, "below layer 0", range(-1, 2)))
    no_layers = Spec((), *no_range.inner, (RULE, "is empty", range(2, 2), range(3, 1)))
    refuse_each(partial(_named, check_layer_range), {}, {"src_layer_range": no_layers})
    specs = {"layer_range": no_range, "tensor_num_per_layer": integer(1, 2**32 - 1, -1)}
    refuse_each(layer_range_to_tensor_indices, {"layer_range": range(1)}, specs)
    for layers, per_layer, tensors in (
        (range(2), 2, [0, 1, 2, 3]),
        (range(1, 2), 2, [2, 3]),
        (range(1, 3), 3, [3, 4, 5, 6, 7, 8]),
        (range(4, 5), 1, [4]),
        (range(0), 2, []),
        (range(5, 2), 2, []),
    ):
        assert layer_range_to_tensor_indices(layers, per_layer) == tensors


FULL = """
import sys
from faults.limits import little_memory
from llm_datadist.errors import OutOfMemory
from llm_datadist._checks import typed_memory_error
for _ in range(2):
    kept = ()
    with typed_memory_error("nothing"):
        pass  # there is memory again
    with little_memory(0):
        try:
            with typed_memory_error("fill"):
                for size in range(464, -16, -16):
                    try:
                        while True:
                            kept = kept, bytes(size)
                    except MemoryError:
                        pass
                bytes(1 << 30)
        except OutOfMemory as error:
            del kept
            print(error)
"""


def test_where_no_memory_at_all_is_left_the_error_still_says_so_each_time() -> None:
    """Regression: ``init`` raised a plain MemoryError: there was no memory for the text of OutOfMemory either."""
    command = [sys.executable, "-c", FULL]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert (ended.stdout, ended.stderr) == ("fill: this process has no memory left: MemoryError()\n" * 2, "")
