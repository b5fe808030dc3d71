"""v1: caches, keys, dropped handles, swaps and tensors of one process (interface §4, §8, R3, R4, R6, R10, R12, R21).

What it does like the C++-shaped calls: test_dialects.py."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, KvCache, LLMStatusCode, Placement
from llm_datadist._deadline import Deadline
from llm_datadist.errors import (
    DeadlineExceeded,
    KeyInUse,
    LLMException,
    NotInitialized,
    OutOfMemory,
    StateError,
)
from llm_datadist.testing import StagedDevice
from llm_datadist.views import tensor_views
from tests.faults.gates import shut
from tests.support.gates import begin
from tests.support.moves import picture, same_bytes
from tests.support.v1 import DIRECT, POOL, desc, start_end
from tests.support.world import fill, make_config, read

if TYPE_CHECKING:
    from pathlib import Path

    from llm_datadist import KvCacheManager
    from tests.support.ends import LocalEnd
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "KvCache",
    "KvCache: *",
    "KvCacheManager: allocate_blocks_cache allocate_cache copy_blocks copy_cache deallocate_cache",
    "KvCacheManager: get_cache_tensors remove_cache_key swap_blocks",
)

PLACEHOLDER = CacheKey(1, 2**64 - 1)


@pytest.fixture(params=["pool", "direct"])
def prompt(end: LocalEnd, request: pytest.FixtureRequest) -> KvCacheManager:
    """A PROMPT's manager, with a pool and without any."""
    start_end(end, "PROMPT", **(POOL if request.param == "pool" else DIRECT))
    return end.world.dd.kv_cache_manager


def test_the_manager_is_one_object_until_finalize_and_dead_after(end: LocalEnd) -> None:
    start_end(end, "PROMPT")
    datadist = end.world.dd
    manager = datadist.kv_cache_manager
    assert datadist.kv_cache_manager is manager
    assert manager.is_initialized()
    with pytest.raises(StateError, match="kv_cache_manager") as wrong_mode:
        _ = datadist.cache_manager
    assert wrong_mode.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    cache = manager.allocate_cache(desc())
    datadist.finalize()
    assert not manager.is_initialized()
    with pytest.raises(NotInitialized):
        _ = datadist.kv_cache_manager
    with pytest.raises(NotInitialized):
        _ = datadist.cache_manager
    datadist.init(make_config(listen_ip_info="127.0.0.1:0", **POOL))
    assert datadist.kv_cache_manager is not manager
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("allocate_cache", (desc(),)),
        ("allocate_blocks_cache", (desc(),)),
        ("deallocate_cache", (cache,)),
        ("remove_cache_key", (PLACEHOLDER,)),
        ("pull_cache", (PLACEHOLDER, cache)),
        ("pull_blocks", (BlocksCacheKey(1), cache, [0], [0])),
        ("copy_cache", (cache, cache)),
        ("copy_blocks", (cache, {0: [1]})),
        ("swap_blocks", (cache, cache, {0: 1})),
        ("get_cache_tensors", (cache,)),
        ("transfer_cache_async", (cache, None, [])),
    ]
    for name, args in calls:
        with pytest.raises(StateError, match="finalized") as dead:  # interface R21
            getattr(manager, name)(*args)
        assert dead.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED, name
    del cache  # its id belongs to the old manager and means nothing to the new one
    gc.collect()
    survivor = datadist.kv_cache_manager.allocate_cache(desc())
    assert survivor.cache_id == 1
    assert datadist.statistics().caches.live == 1


def test_v2_mode_has_no_kv_cache_manager(end: LocalEnd) -> None:
    end.start("MIX", 1)
    with pytest.raises(LLMException, match="cache_manager") as wrong_mode:
        _ = end.world.dd.kv_cache_manager
    assert wrong_mode.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert not isinstance(wrong_mode.value, NotInitialized)


def test_r03_r04_r06_caches_and_keys_come_and_go_and_what_is_refused_changes_nothing(
    end: LocalEnd, prompt: KvCacheManager
) -> None:
    before = end.do(picture)
    caches = [prompt.allocate_cache(desc(3)), prompt.allocate_blocks_cache(desc(2), BlocksCacheKey(1, 4))]
    keys = [PLACEHOLDER, CacheKey(1, 7), PLACEHOLDER, CacheKey(1, 8, 1)]
    caches.append(prompt.allocate_cache(desc(1), keys))
    assert [cache.cache_id for cache in caches] == [1, 2, 3]
    assert [[len(addrs) for addrs in cache.per_device_tensor_addrs] for cache in caches] == [[3], [2], [1]]
    assert all(address for cache in caches for address in cache.per_device_tensor_addrs[0])
    assert caches[0].cache_desc.num_tensors == 3
    assert repr(caches[1]) == "<KvCache 2: blocks, 2 x [8, 48] DT_UINT8 on DEVICE>"

    full = end.do(picture)
    with pytest.raises(KeyInUse, match="bound to cache 3") as rows:
        prompt.allocate_cache(desc(), [CacheKey(1, 6), CacheKey(1, 7)])
    with pytest.raises(KeyInUse, match="bound to cache 2") as paged:
        prompt.allocate_blocks_cache(desc(), BlocksCacheKey(1, 4))
    assert {rows.value.status_code, paged.value.status_code} == {LLMStatusCode.LLM_FAILED}
    with pytest.raises(OutOfMemory) as caught:
        prompt.allocate_cache(CacheDesc(4, [1 << 12, 1 << 40], DataType.DT_UINT8), [CacheKey(1, 6)])
    assert caught.value.status_code is LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
    assert caught.value.requested == 1 << 54
    assert str(1 << 54) in str(caught.value)
    assert end.do(picture) == full

    for _ in range(2):  # the second time nothing happens
        for cache in caches:
            prompt.deallocate_cache(cache)
            assert cache.per_device_tensor_addrs == []
    # Keys keep a deallocated cache, placeholders do not.
    assert end.do(picture).caches.deferred == 1
    for key in (PLACEHOLDER, CacheKey(1, 7), CacheKey(1, 7)):
        prompt.remove_cache_key(key)
        assert end.do(picture).caches.deferred == 1
    prompt.remove_cache_key(CacheKey(9, 8, 1))  # the cluster id does not matter here
    after = end.do(picture)
    assert (after.caches, after.keys) == (before.caches, before.keys)
    assert [pool.used_bytes for pool in after.pools] == [0]
    assert prompt.allocate_cache(desc()).cache_id == 4  # no id comes twice


# --- handles that are dropped ----------------------------------------------------------------------------------------


def test_a_dropped_handle_gives_its_cache_back_at_the_next_call(end: LocalEnd, prompt: KvCacheManager) -> None:
    kept = prompt.allocate_cache(desc())
    dropped = [prompt.allocate_cache(desc()) for _ in range(3)] + [prompt.allocate_blocks_cache(desc())]
    published = prompt.allocate_cache(desc(), [CacheKey(1, 7)])
    assert (end.do(picture).caches.live, len(dropped)) == (6, 4)
    del dropped, published
    gc.collect()
    assert end.do(picture).caches.live == 6, "__del__ frees nothing by itself: it may run under any lock"
    prompt.get_cache_tensors(kept)
    caches = end.do(picture).caches
    assert (caches.live, caches.deferred) == (1, 1)  # the published one waits for its key


def test_a_handle_may_be_dropped_under_a_lock_of_the_library_and_one_that_was_deallocated_queues_nothing(
    end: LocalEnd,
) -> None:
    start_end(end, "PROMPT", **DIRECT)
    manager = end.world.dd.kv_cache_manager
    first, cache = manager.allocate_cache(desc()), manager.allocate_cache(desc())
    manager.deallocate_cache(first)
    host = KvCache.create_cpu_cache(CacheDesc(1, [1, 1], DataType.DT_UINT8, Placement.HOST), [1])
    del first, host
    gc.collect()
    assert list(manager._forgotten) == []
    engine = end.world.dd._engine
    assert engine is not None

    def drop() -> None:
        nonlocal cache
        with engine.store.registry._lock:
            del cache

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    manager.remove_cache_key(PLACEHOLDER)
    assert end.do(picture).caches.live == 0


def test_a_copy_of_a_handle_is_the_handle_and_it_is_not_pickled(end: LocalEnd) -> None:
    start_end(end, "PROMPT", **DIRECT)
    manager = end.world.dd.kv_cache_manager
    cache = manager.allocate_cache(desc())
    for duplicate in (copy.copy, copy.deepcopy):
        twin = duplicate(cache)
        assert twin is cache
        del twin
    with pytest.raises(TypeError, match=r"KvCache 1: .* cannot be pickled"):
        pickle.dumps(cache)
    gc.collect()
    manager.remove_cache_key(PLACEHOLDER)
    assert end.do(picture).caches.live == 1, "a copy that is dropped must not free the cache"


# --- memory ----------------------------------------------------------------------------------------------------------


def test_r12_v1_takes_mem_pool_cfg_else_the_graph_memory_else_the_device(end: LocalEnd) -> None:
    seen = []
    for extra, settings in (
        ({"ge.flowGraphMemMaxSize": str(1 << 24)}, {"mem_pool_cfg": '{"memory_size": 1048576}'}),
        ({"ge.flowGraphMemMaxSize": str(1 << 24)}, {"mem_pool_cfg": None, "mem_utilization": 0.5}),
        ({}, {"mem_pool_cfg": None}),
    ):
        start_end(end, "DECODER", extra=extra, **settings)
        cache = end.world.dd.kv_cache_manager.allocate_cache(desc(4, 8, 512))
        (pool,) = end.do(picture).pools
        seen.append((pool.name, pool.capacity_bytes, pool.used_bytes))
        del cache
        end.stop()
    assert seen == [
        ("device", 1 << 20, 4 << 16),
        ("device", 1 << 23, 4 << 16),
        ("device, no pool", 4 << 12, 4 << 12),
    ]


def test_r12_without_a_pool_a_device_that_refuses_is_out_of_memory_and_room_is_found_again(end: LocalEnd) -> None:
    device = StagedDevice(refuse_after_bytes=1 << 20)
    start_end(end, "DECODER", device=device, **DIRECT)
    manager = end.world.dd.kv_cache_manager
    half = desc(1, 1, 1 << 19)
    caches = [manager.allocate_cache(half), manager.allocate_cache(half)]
    before = end.do(picture)
    with pytest.raises(OutOfMemory, match="refuses") as caught:
        manager.allocate_cache(half)
    assert caught.value.status_code is LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
    assert end.do(picture) == before
    manager.deallocate_cache(caches.pop())
    assert device.allocated_bytes == 1 << 19
    caches.append(manager.allocate_cache(half))
    assert device.allocated_bytes == 1 << 20
    end.stop()
    assert device.allocated_bytes == 0


def test_get_cache_tensors_is_the_memory_of_the_cache_and_outlives_it(end: LocalEnd) -> None:
    start_end(end, "PROMPT", **DIRECT)
    manager = end.world.dd.kv_cache_manager
    for data_type in DataType:
        if data_type in (DataType.DT_STRING, DataType.DT_BF16):
            continue
        cache = manager.allocate_blocks_cache(CacheDesc(3, [4, 2, 3], data_type))
        for index in range(3):
            (tensor,) = manager.get_cache_tensors(cache, index)
            array = tensor.numpy()
            assert (array.shape, array.itemsize) == ((4, 2, 3), data_type.itemsize)
            assert (tensor.tensor_desc.dtype, tensor.tensor_desc.shape) == (data_type, [4, 2, 3])
            assert array.ctypes.data == cache.per_device_tensor_addrs[0][index]
            array[:] = index
            before = tensor.numpy(copy=True)
            array[0] = 1
            assert (before == np.array(index, array.dtype)).all()
        views = [manager.get_cache_tensors(cache, index)[0].numpy() for index in range(3)]
        manager.deallocate_cache(cache)
        for index, view in enumerate(views):  # memory without a pool stays mapped for its reader
            assert (view[1:] == np.array(index, view.dtype)).all(), data_type
    cache = manager.allocate_cache(CacheDesc(1, [2, 4], DataType.DT_BF16))
    for row in tensor_views(cache._cache)[0]:  # bf16 is read as float32
        row[:] = np.array([0x3F80, 0xC000, 0x0000, 0x7F80], np.uint16)
    (tensor,) = manager.get_cache_tensors(cache)
    np.testing.assert_array_equal(tensor.numpy(), np.array([[1.0, -2.0, 0.0, np.inf]] * 2, np.float32))
    assert tensor.numpy().dtype == np.float32
    end.stop()
    assert (view[1:] == np.array(2, view.dtype)).all()


# --- copies and swaps ------------------------------------------------------------------------------------------------


def test_r09_copy_cache_names_its_request(end: LocalEnd, caplog: pytest.LogCaptureFixture) -> None:
    start_end(end, "DECODER", **DIRECT)
    manager = end.world.dd.kv_cache_manager
    cache = manager.allocate_cache(desc())
    with caplog.at_level(logging.INFO, logger="LLM_DATADIST"):
        manager.copy_cache(cache, cache, 2, 5, 7, 11, 4711)
    assert "req_id=4711" in caplog.text


def test_r10_no_staging_memory_is_v1s_own_code(end: LocalEnd) -> None:
    device = StagedDevice()
    start_end(end, "DECODER", device=device)
    manager = end.world.dd.kv_cache_manager
    cache = manager.allocate_blocks_cache(desc())
    memory = np.zeros(8 * 48, np.uint8)
    host_desc = CacheDesc(4, [8, 48], DataType.DT_UINT8, Placement.HOST)
    addrs = [memory.ctypes.data] * 4
    host = KvCache.create_cpu_cache(host_desc, addrs)  # one list for the one device will do
    assert (host.cache_id, host.per_device_tensor_addrs) == (-1, [addrs])
    before = fill(cache._cache, 1)
    device.refuse_after(device.allocated_bytes)
    with pytest.raises(OutOfMemory, match="staging") as caught:
        manager.swap_blocks(host, cache, {0: 0})
    assert caught.value.status_code is LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
    same_bytes(read(cache._cache), before)


@pytest.mark.parametrize("method", ["copy_cache", "copy_blocks"])
def test_r06_a_local_copy_that_times_out_has_v1s_code(end: LocalEnd, method: str, tmp_path: Path) -> None:
    start_end(end, "DECODER", sync_kv_timeout=50)
    manager = end.world.dd.kv_cache_manager
    rows = method == "copy_cache"
    cache = manager.allocate_cache(desc()) if rows else manager.allocate_blocks_cache(desc())
    args: tuple[Any, ...] = (cache, cache, 1, 0) if rows else (cache, {0: [1]})
    before = fill(cache._cache, 1)
    with shut(end.world.dd, "hold", tmp_path) as gate:
        collect = begin(end, _call, method, args)
        gate.wait()
        passed = Deadline(50)  # made after the call's own
        assert passed.poll(passed.expired)
        gate.open()
        with pytest.raises(DeadlineExceeded) as caught:
            collect()
    assert caught.value.status_code is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    same_bytes([tensor[2:] for tensor in read(cache._cache)], [tensor[2:] for tensor in before])


def _call(world: World, method: str, args: tuple[Any, ...]) -> None:
    getattr(world.dd.kv_cache_manager, method)(*args)
