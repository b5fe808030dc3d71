"""The exception tree: bases, fields, pickling (interface R1, R29, §1.2, §1.3).

Bases, default status and whether to try again, class by class: docs/errors.md, which tests/test_docs.py compares.
"""

import copy
import inspect
import pickle
from typing import Any

import pytest

from llm_datadist import errors
from llm_datadist.errors import DeadlineExceeded, LLMException, LLMStatusCode, OutOfMemory, Status, code_2_status

pytestmark = pytest.mark.covers(
    "LLMStatusCode", "LLMStatusCode: *", "Status", "Status: is_ok status_code", "code_2_status", "errors: *"
)

TREE = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, LLMException)]

#: The codes that follow one another, from the first number on.
CODES = {
    0x5010B001: "WAIT_PROCESS_TIMEOUT KV_CACHE_NOT_EXIST REPEAT_REQUEST REQUEST_ALREADY_COMPLETED PARAM_INVALID "
    "ENGINE_FINALIZED NOT_YET_LINK ALREADY_LINK LINK_FAILED UNLINK_FAILED NOTIFY_PROMPT_UNLINK_FAILED "
    "CLUSTER_NUM_EXCEED_LIMIT PROCESSING_LINK DEVICE_OUT_OF_MEMORY PREFIX_ALREADY_EXIST PREFIX_NOT_EXIST "
    "SEQ_LENOVERLIMIT NO_FREE_BLOCK BLOCKS_OUT_OF_MEMORY",
    0x5010B018: "EXIST_LINK FEATURE_NOT_ENABLED TIMEOUT LINK_BUSY OUT_OF_MEMORY",
    0: "SUCCESS",
    2**32 - 1: "FAILED",
    507053: "DEVICE_MEM_ERROR",
    507057: "SUSPECT_REMOTE_ERROR",
    -1: "UNKNOWN_ERROR",
}


def test_status_codes_have_the_documented_values_and_names() -> None:
    assert {code.name: int(code) for code in LLMStatusCode} == {
        f"LLM_{name}": number for first, names in CODES.items() for number, name in enumerate(names.split(), first)
    }
    assert str(LLMStatusCode.LLM_TIMEOUT) == "LLMStatusCode.LLM_TIMEOUT"


def test_code_2_status_finds_every_code_and_takes_all_else_for_failed() -> None:
    assert [code_2_status(int(code)) for code in LLMStatusCode] == list(LLMStatusCode)
    assert [code for code in LLMStatusCode if Status(code).is_ok()] == [LLMStatusCode.LLM_SUCCESS]
    assert Status(1343270938).status_code is LLMStatusCode.LLM_TIMEOUT
    native_only = (0x5010B014, 0x5010B015, 0x5010B016, 0x5010B017, 12345, -2)
    no_number: tuple[Any, ...] = ("0", None, 0.5, [], LLMStatusCode)
    for value in (*native_only, *no_number):
        assert code_2_status(value) is LLMStatusCode.LLM_FAILED
        assert not Status(value).is_ok()


BUILTINS: dict[type[LLMException], set[type[Exception]]] = {
    errors.ParamError: {ValueError},
    errors.NoneArgument: {TypeError, AttributeError},
    errors.CacheMismatch: {ValueError},
    errors.CacheNotFound: {LookupError},
    OutOfMemory: {MemoryError},
    DeadlineExceeded: {TimeoutError, OSError},
}


def test_r01_r29_every_class_has_its_builtins_text_and_status_and_survives_pickle_and_copy() -> None:
    some = (ValueError, TypeError, AttributeError, LookupError, MemoryError, TimeoutError, OSError)
    for kind in TREE:
        error = kind("text")
        assert isinstance(error, RuntimeError)
        assert {each for each in some if each in kind.__mro__} == BUILTINS.get(kind, set())
        assert (str(error), error.status_code) == ("text", kind.default_status)
        assert (error.peer, error.phase) == (None, None)
        error = kind("what failed", status_code=LLMStatusCode.LLM_LINK_BUSY)
        error.peer, error.phase = 2**64 - 1, "copy"
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(again) is kind
            assert (str(again), again.args) == ("what failed", ("what failed",))
            assert (again.status_code, again.peer, again.phase) == (LLMStatusCode.LLM_LINK_BUSY, 2**64 - 1, "copy")
    assert LLMException().status_code is LLMStatusCode.LLM_SUCCESS
    error = LLMException("text", 7, status_code=LLMStatusCode.LLM_LINK_BUSY)
    assert (error.status_code, error.args) == (LLMStatusCode.LLM_LINK_BUSY, ("text", 7))


def test_own_fields_survive_pickle_and_a_restated_exception_carries_the_other_status_and_all_else() -> None:
    memory = OutOfMemory("full", pool="device", requested=3, free=2, largest_hole=1, quarantined=4)
    again = pickle.loads(pickle.dumps(memory))
    assert (again.pool, again.requested, again.free, again.largest_hole, again.quarantined) == ("device", 3, 2, 1, 4)
    late = DeadlineExceeded("late", phase="resolve", budget_ms=1000, elapsed_ms=1001.5, peer=3)
    assert late.status_code is LLMStatusCode.LLM_TIMEOUT
    late.restate(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
    for error in (late, pickle.loads(pickle.dumps(late))):
        assert error.status_code is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
        assert (str(error), error.phase, error.budget_ms) == ("late", "resolve", 1000)
        assert (error.elapsed_ms, error.peer) == (1001.5, 3)


def test_all_lists_every_public_name() -> None:
    public = {name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__}
    assert {name for name in public if not name.startswith("_")} == set(errors.__all__)
