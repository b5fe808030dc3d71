"""RegisterKvCache, UnregisterKvCache, AllocateCache, DeallocateCache: what is given out comes back (API §9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llm_datadist import DataType
from llm_datadist.cpp_api import CacheDesc, LlmRole
from llm_datadist.errors import LLMStatusCode
from tests.support.cpp import BAD, DEVICE, HOST, OK, Shape, dist, made, run, show, start, unchanged
from tests.support.moves import same_bytes

if TYPE_CHECKING:
    from tests.support.ends import LocalEnd


def test_what_is_allocated_is_of_both_uses_and_outlives_finalize_for_its_reader(end: LocalEnd) -> None:
    end.do(start, LlmRole.kMix, 1, "auto", {})
    wanted = end.do(made, "kv", Shape(), 1)
    assert dist(end.world).Finalize() is OK
    same_bytes(end.do(show, "kv"), wanted)  # the struct keeps the pool mapped


def test_allocate_fails_without_changing_anything(end: LocalEnd) -> None:
    end.do(start, LlmRole.kMix, 1, "auto", {"llm.HostMemPoolConfig": ""})
    end.do(made, "kv", Shape(), 1)
    no_pool = CacheDesc(HOST, 1, DataType.DT_INT8, [1])
    unchanged([end], ["kv"], BAD, ("llm.HostMemPoolConfig",), "AllocateCache", no_pool)
    huge = CacheDesc(DEVICE, 1, DataType.DT_INT8, [1 << 30])
    unchanged([end], ["kv"], LLMStatusCode.LLM_OUT_OF_MEMORY, (str(1 << 30),), "AllocateCache", huge)


def test_memory_comes_back_when_caches_are_given_back(end: LocalEnd) -> None:
    end.do(start, LlmRole.kMix, 1, "auto", {})
    end.do(made, "kv", Shape(), 1)
    assert end.world.dd.statistics().pools[0].used_bytes == 4 * 4096
    for _ in range(2):  # the second time it is unknown, and that is no error
        assert end.do(run, "DeallocateCache", 1) is OK
        assert end.world.dd.statistics().pools[0].used_bytes == 0
    assert end.do(run, "UnregisterKvCache", 1) is OK
    array = np.zeros(8, np.int8)
    status, number = end.do(run, "RegisterKvCache", CacheDesc(DEVICE, 1, DataType.DT_INT8, [8]), [array.ctypes.data])
    assert (status, number) == (OK, 2)
    assert end.do(run, "DeallocateCache", 2) is OK  # it is registered: this is not the call
    assert end.world.dd.statistics().caches.registered == 1
    assert end.do(run, "UnregisterKvCache", 2) is OK
    assert end.world.dd.statistics().caches.live == 0
