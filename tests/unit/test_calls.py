"""The two forms of a call that one checking function makes, and the table of arguments."""

from __future__ import annotations

import inspect
import logging
import re

import pytest

from llm_datadist import CacheDesc, DataType, LLMDataDist, LLMRole
from llm_datadist._transfer.arguments import ARGUMENTS, check
from llm_datadist.cache_manager import CacheManager
from llm_datadist.errors import NoneArgument, ParamError


@pytest.mark.parametrize(
    "name", ["pull_cache", "pull_blocks", "push_cache", "push_blocks", "copy_cache", "copy_blocks", "swap_blocks"]
)
def test_both_forms_show_the_same_parameters_and_their_own_result(name: str) -> None:
    call, awaited = getattr(CacheManager, name), getattr(CacheManager, f"{name}_async")
    now, later = inspect.signature(call), inspect.signature(awaited)
    assert list(now.parameters.values()) == list(later.parameters.values())
    assert (now.return_annotation, later.return_annotation) == ("None", "Coroutine[Any, Any, None]")
    assert call.__annotations__["return"] == "None"
    assert awaited.__annotations__["return"] == "Coroutine[Any, Any, None]"
    assert (call.__name__, awaited.__name__) == (name, f"{name}_async")
    assert re.fullmatch(rf"Await :meth:`{name}`.*; extension\.", awaited.__doc__ or "", re.DOTALL)


def test_arguments_are_checked_by_name_in_the_order_given() -> None:
    assert check(ARGUMENTS, offset=3, batch_index=0, req_id=None, src_cache_offset=None) == [3, 0, None, 0]
    with pytest.raises(ParamError, match=r"^batch_index: -1 is outside"):
        check(ARGUMENTS, offset=3, batch_index=-1, size="not reached")
    with pytest.raises(NoneArgument, match=r"^cache only support \[Cache\] but got None"):
        check(ARGUMENTS, cache=None, batch_index=-1)


def test_the_log_of_a_call_names_the_line_of_the_user(caplog: pytest.LogCaptureFixture) -> None:
    dd = LLMDataDist(LLMRole.DECODER, 1)
    dd.init({"ge.exec.deviceId": "0", "llm.EnableCacheManager": "1", "llm.MemPoolConfig": '{"memory_size": 65536}'})
    with caplog.at_level(logging.INFO, "LLM_DATADIST"):
        cache = dd.cache_manager.allocate_blocks_cache(CacheDesc(1, [2, 16], DataType.DT_UINT8))
        dd.cache_manager.copy_blocks(cache, {0: [1]})
        dd.cache_manager.deallocate_blocks_cache(cache)
    dd.finalize()
    spans = [each for each in caplog.records if " started " in each.getMessage() or " succeeded " in each.getMessage()]
    assert len(spans) == 6
    assert {each.pathname for each in spans} == {__file__}
