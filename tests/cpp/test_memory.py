"""RegisterKvCache, UnregisterKvCache, AllocateCache, DeallocateCache: what is given out comes back (interface §9)."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import DataType
from llm_datadist.cpp_api import CacheDesc, LlmRole
from llm_datadist.errors import LLMStatusCode
from tests.support.cpp import BAD, DEVICE, HOST, OK, Shape, dist, made, run, show, start, unchanged
from tests.support.moves import same_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.cpp_api import Cache
    from tests.support.ends import LocalEnd

pytestmark = pytest.mark.covers("cpp_api.LlmDataDist: AllocateCache DeallocateCache UnregisterKvCache")


def test_what_is_allocated_is_of_both_uses_and_outlives_finalize_for_its_reader(end: LocalEnd) -> None:
    end.do(start, LlmRole.kMix, 1, "auto", {})
    wanted = end.do(made, "kv", Shape(), 1)
    assert dist(end.world).Finalize() is OK
    same_bytes(end.do(show, "kv"), wanted)  # the struct keeps the pool mapped


def _sent(cache: Cache) -> Any:
    data = pickle.dumps(cache)
    assert len(data) < 4096, "the bytes of the pool went along"
    return pickle.loads(data)


def test_a_copy_of_the_struct_is_the_same_fields_and_never_a_copy_of_the_memory(end: LocalEnd) -> None:
    end.do(start, LlmRole.kMix, 1, "auto", {})
    end.do(made, "kv", Shape(), 1)
    cache = end.world.memory["cache kv"]
    before = end.world.dd.statistics()
    ways: list[Callable[[Cache], Any]] = [copy.copy, copy.deepcopy, replace, asdict, _sent]
    for duplicate in ways:
        twin = duplicate(cache)
        given = twin if isinstance(twin, dict) else {name: getattr(twin, name) for name in ("cache_id", "tensor_addrs")}
        assert (given["cache_id"], given["tensor_addrs"]) == (cache.cache_id, cache.tensor_addrs), duplicate
        assert isinstance(twin, dict) or twin == cache
        assert duplicate is not copy.deepcopy or twin._memory is cache._memory
        del twin, given
    assert end.world.dd.statistics().caches == before.caches  # it frees nothing either


def test_allocate_fails_without_changing_anything(end: LocalEnd) -> None:
    end.do(start, LlmRole.kMix, 1, "auto", {"llm.HostMemPoolConfig": ""})
    end.do(made, "kv", Shape(), 1)
    no_pool = CacheDesc(HOST, 1, DataType.DT_INT8, [1])
    unchanged([end], ["kv"], BAD, ("llm.HostMemPoolConfig",), "AllocateCache", no_pool)
    huge = CacheDesc(DEVICE, 1, DataType.DT_INT8, [1 << 30])
    unchanged([end], ["kv"], LLMStatusCode.LLM_OUT_OF_MEMORY, (str(1 << 30),), "AllocateCache", huge)


def test_deallocate_is_for_allocated_and_unregister_for_registered_caches(end: LocalEnd) -> None:
    end.do(start, LlmRole.kMix, 1, "auto", {})
    array = np.zeros(8, np.int8)
    registered = end.do(run, "RegisterKvCache", CacheDesc(DEVICE, 1, DataType.DT_INT8, [8]), [array.ctypes.data])
    assert registered == (OK, 1)
    assert end.do(run, "DeallocateCache", 1) is OK  # it is registered: this is not the call
    assert end.world.dd.statistics().caches.registered == 1
    for _ in range(2):  # the second time it is unknown, and that is no error
        assert end.do(run, "UnregisterKvCache", 1) is OK
        assert end.world.dd.statistics().caches.live == 0
