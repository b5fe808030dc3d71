"""The exception tree: bases, default codes, fields, pickling (interface R1, R29, §1.2, §1.3)."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from llm_datadist import errors
from llm_datadist.errors import (
    CacheMismatch,
    CacheNotFound,
    DeadlineExceeded,
    LinkError,
    LLMException,
    LLMStatusCode,
    NoneArgument,
    OutOfMemory,
    ParamError,
    PeerLost,
    Status,
    code_2_status,
)

pytestmark = pytest.mark.covers(
    "LLMStatusCode", "LLMStatusCode: *", "Status", "Status: is_ok status_code", "code_2_status", "errors: *"
)

TREE = [
    value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, LLMException)
]  # the root included

CODES = {
    "LLM_SUCCESS": 0,
    "LLM_FAILED": 4294967295,
    "LLM_WAIT_PROCESS_TIMEOUT": 1343270913,
    "LLM_KV_CACHE_NOT_EXIST": 1343270914,
    "LLM_REPEAT_REQUEST": 1343270915,
    "LLM_REQUEST_ALREADY_COMPLETED": 1343270916,
    "LLM_PARAM_INVALID": 1343270917,
    "LLM_ENGINE_FINALIZED": 1343270918,
    "LLM_NOT_YET_LINK": 1343270919,
    "LLM_ALREADY_LINK": 1343270920,
    "LLM_LINK_FAILED": 1343270921,
    "LLM_UNLINK_FAILED": 1343270922,
    "LLM_NOTIFY_PROMPT_UNLINK_FAILED": 1343270923,
    "LLM_CLUSTER_NUM_EXCEED_LIMIT": 1343270924,
    "LLM_PROCESSING_LINK": 1343270925,
    "LLM_DEVICE_OUT_OF_MEMORY": 1343270926,
    "LLM_PREFIX_ALREADY_EXIST": 1343270927,
    "LLM_PREFIX_NOT_EXIST": 1343270928,
    "LLM_SEQ_LENOVERLIMIT": 1343270929,
    "LLM_NO_FREE_BLOCK": 1343270930,
    "LLM_BLOCKS_OUT_OF_MEMORY": 1343270931,
    "LLM_EXIST_LINK": 1343270936,
    "LLM_FEATURE_NOT_ENABLED": 1343270937,
    "LLM_TIMEOUT": 1343270938,
    "LLM_LINK_BUSY": 1343270939,
    "LLM_OUT_OF_MEMORY": 1343270940,
    "LLM_DEVICE_MEM_ERROR": 507053,
    "LLM_SUSPECT_REMOTE_ERROR": 507057,
    "LLM_UNKNOWN_ERROR": -1,
}


def test_status_codes_have_the_documented_values_and_names() -> None:
    assert {code.name: int(code) for code in LLMStatusCode} == CODES
    assert str(LLMStatusCode.LLM_TIMEOUT) == "LLMStatusCode.LLM_TIMEOUT"


def test_code_2_status_finds_every_code_and_takes_all_else_for_failed() -> None:
    assert [code_2_status(int(code)) for code in LLMStatusCode] == list(LLMStatusCode)
    native_only = (0x5010B014, 0x5010B015, 0x5010B016, 0x5010B017, 12345, -2)
    no_number: tuple[Any, ...] = ("0", None, 0.5, [], LLMStatusCode)
    for value in (*native_only, *no_number):
        assert code_2_status(value) is LLMStatusCode.LLM_FAILED
        assert not Status(value).is_ok()


def test_status_says_whether_it_is_ok() -> None:
    assert Status(LLMStatusCode.LLM_SUCCESS).is_ok()
    assert not Status(LLMStatusCode.LLM_TIMEOUT).is_ok()
    assert Status(1343270938).status_code is LLMStatusCode.LLM_TIMEOUT


#: What the pages ask for: built-in classes beside LLMException, and the status; LLM_FAILED where it is not here.
BUILTINS: dict[type[LLMException], tuple[type[Exception], ...]] = {
    ParamError: (ValueError,),
    NoneArgument: (TypeError, AttributeError),
    CacheMismatch: (ValueError,),
    CacheNotFound: (LookupError,),
    OutOfMemory: (MemoryError,),
    DeadlineExceeded: (TimeoutError, OSError),
}
STATUSES = {
    "LLMException": "LLM_SUCCESS",  # interface R29: an exception made by hand, and no other class
    "ParamError": "LLM_PARAM_INVALID",
    "NoneArgument": "LLM_PARAM_INVALID",
    "KeyInUse": "LLM_PARAM_INVALID",
    "CacheMismatch": "LLM_PARAM_INVALID",
    "OutOfMemory": "LLM_OUT_OF_MEMORY",
    "CacheNotFound": "LLM_KV_CACHE_NOT_EXIST",
    "LinkError": "LLM_LINK_FAILED",
    "LinkRefused": "LLM_LINK_FAILED",
    "AuthFailed": "LLM_LINK_FAILED",
    "NotLinked": "LLM_NOT_YET_LINK",
    "AlreadyLinked": "LLM_ALREADY_LINK",
    "PeerLost": "LLM_SUSPECT_REMOTE_ERROR",
    "DeadlineExceeded": "LLM_TIMEOUT",
}
FAILED = "StateError NotInitialized CacheError TransferFailed TransferAborted ChecksumMismatch ProtocolError"


def test_r1_r29_every_class_is_a_runtime_error_with_its_builtins_and_its_status() -> None:
    assert {*STATUSES, *FAILED.split()} == {kind.__name__ for kind in TREE}
    for kind in TREE:
        error = kind("text")
        assert isinstance(error, LLMException)
        assert isinstance(error, RuntimeError)
        assert all(isinstance(error, each) for each in BUILTINS.get(kind, ()))
        assert str(error) == "text"
        assert error.status_code.name == STATUSES.get(kind.__name__, "LLM_FAILED"), kind


def test_status_given_by_keyword_wins() -> None:
    error = LLMException("text", 7, status_code=LLMStatusCode.LLM_LINK_BUSY)
    assert error.status_code is LLMStatusCode.LLM_LINK_BUSY
    assert error.args == ("text", 7)


@pytest.mark.parametrize("kind", TREE)
def test_every_class_survives_pickle_and_copy(kind: type[LLMException]) -> None:
    error = kind("what failed", status_code=LLMStatusCode.LLM_LINK_BUSY)
    error.peer, error.phase = 2**64 - 1, "copy"
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind
        assert again.args == ("what failed",)
        assert str(again) == "what failed"
        assert (again.status_code, again.peer, again.phase) == (LLMStatusCode.LLM_LINK_BUSY, 2**64 - 1, "copy")


def test_a_restated_exception_carries_the_other_status_and_all_else() -> None:
    error = DeadlineExceeded("late", phase="copy", budget_ms=5.0, peer=7)
    error.restate(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
    assert error.status_code is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    assert (str(error), error.phase, error.budget_ms, error.peer) == ("late", "copy", 5.0, 7)
    assert DeadlineExceeded("late").status_code is LLMStatusCode.LLM_TIMEOUT


def test_own_fields_survive_pickle() -> None:
    memory = OutOfMemory("full", pool="device", requested=3, free=2, largest_hole=1, quarantined=4)
    again = pickle.loads(pickle.dumps(memory))
    assert (again.pool, again.requested, again.free, again.largest_hole, again.quarantined) == ("device", 3, 2, 1, 4)
    late = DeadlineExceeded("late", phase="resolve", budget_ms=1000, elapsed_ms=1001.5, peer=3)
    again = pickle.loads(pickle.dumps(late))
    assert (again.phase, again.budget_ms, again.elapsed_ms, again.peer) == ("resolve", 1000, 1001.5, 3)


def test_retryable_says_whether_the_same_call_may_succeed_later() -> None:
    retryable = "CacheNotFound ChecksumMismatch DeadlineExceeded LinkError LinkRefused NotLinked OutOfMemory PeerLost"
    retryable += " TransferAborted TransferFailed"
    assert {kind.__name__ for kind in TREE if kind.retryable} == set(retryable.split())


def test_fields_default_to_none() -> None:
    error = PeerLost("gone")
    assert (error.peer, error.phase) == (None, None)
    assert isinstance(error, LinkError)


def test_all_lists_every_public_name() -> None:
    public = {name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__}
    assert {name for name in public if not name.startswith("_")} == set(errors.__all__)
