"""v1: caches, keys, dropped handles, copies, swaps and tensors of one process (interface §4, §8, R4, R6, R10, R12,
R21)."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, KvCache, LLMRole, LLMStatusCode, Placement
from llm_datadist._deadline import Deadline
from llm_datadist.errors import (
    CacheNotFound,
    DeadlineExceeded,
    KeyInUse,
    LLMException,
    NotInitialized,
    OutOfMemory,
    ParamError,
    StateError,
)
from llm_datadist.testing import StagedDevice
from tests.faults.gates import shut
from tests.support.gates import begin
from tests.support.linking import info
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
    "KvCacheManager: remove_cache_key swap_blocks",
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


def test_the_gates_go_by_the_role_of_now_and_caches_survive_the_switch(end: LocalEnd) -> None:
    start_end(end, "DECODER", enable_switch_role=True, **DIRECT)
    datadist, manager = end.world.dd, end.world.dd.kv_cache_manager
    kept = manager.allocate_cache(desc())
    before = fill(kept._cache, 1)
    with pytest.raises(ParamError, match="DECODER"):
        manager.allocate_cache(desc(), [CacheKey(1, 7)])
    datadist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:0"})
    assert datadist.kv_cache_manager is manager
    published = manager.allocate_cache(desc(), [CacheKey(1, 7)])
    manager.deallocate_cache(published)
    manager.remove_cache_key(CacheKey(1, 7))
    with pytest.raises(ParamError, match="PROMPT"):
        manager.pull_cache(CacheKey(1, 7), kept)
    assert datadist.link_clusters([info(2, 1)])[0] is LLMStatusCode.LLM_PARAM_INVALID
    same_bytes(read(kept._cache), before)
    assert end.do(picture).caches.live == 1


def test_ids_count_from_one_and_a_cache_has_the_addresses_of_one_device(prompt: KvCacheManager) -> None:
    caches = [prompt.allocate_cache(desc(3)), prompt.allocate_blocks_cache(desc(2)), prompt.allocate_cache(desc(1))]
    assert [cache.cache_id for cache in caches] == [1, 2, 3]
    assert [len(cache.per_device_tensor_addrs) for cache in caches] == [1, 1, 1]
    assert [len(cache.per_device_tensor_addrs[0]) for cache in caches] == [3, 2, 1]
    assert all(address for cache in caches for address in cache.per_device_tensor_addrs[0])
    assert caches[0].cache_desc.num_tensors == 3
    assert repr(caches[1]) == "<KvCache 2: blocks, 2 x [8, 48] DT_UINT8 on DEVICE>"
    prompt.deallocate_cache(caches[0])
    assert caches[0].per_device_tensor_addrs == []
    assert prompt.allocate_cache(desc()).cache_id == 4  # no id comes twice


def test_deallocate_frees_both_kinds_and_does_nothing_the_second_time(end: LocalEnd, prompt: KvCacheManager) -> None:
    before = end.do(picture)
    rows = prompt.allocate_cache(desc())
    paged = prompt.allocate_blocks_cache(desc(), BlocksCacheKey(1, 4))
    for _ in range(2):
        prompt.deallocate_cache(rows)
        prompt.deallocate_cache(paged)
    after = end.do(picture)
    assert (after.caches, after.keys) == (before.caches, before.keys)
    assert [pool.used_bytes for pool in after.pools] == [0]


def test_r04_placeholders_bind_nothing_and_keys_keep_a_deallocated_cache(end: LocalEnd, prompt: KvCacheManager) -> None:
    keys = [PLACEHOLDER, CacheKey(1, 7), PLACEHOLDER, CacheKey(1, 8, 1)]
    cache = prompt.allocate_cache(desc(2, 8, 64), keys)
    prompt.deallocate_cache(cache)
    assert end.do(picture).caches.deferred == 1
    prompt.remove_cache_key(PLACEHOLDER)
    prompt.remove_cache_key(CacheKey(1, 7))
    prompt.remove_cache_key(CacheKey(1, 7))
    assert end.do(picture).caches.deferred == 1
    prompt.remove_cache_key(CacheKey(9, 8, 1))  # the cluster id does not matter here
    assert (end.do(picture).caches.deferred, end.do(picture).pools[0].used_bytes) == (0, 0)


def test_r03_a_key_in_use_is_llm_failed_in_v1_and_nothing_is_allocated(end: LocalEnd, prompt: KvCacheManager) -> None:
    held = [prompt.allocate_cache(desc(), [CacheKey(1, 7)]), prompt.allocate_blocks_cache(desc(), BlocksCacheKey(1, 2))]
    before = end.do(picture)
    with pytest.raises(KeyInUse, match="bound to cache 1") as rows:
        prompt.allocate_cache(desc(), [CacheKey(1, 6), CacheKey(1, 7)])
    with pytest.raises(KeyInUse, match="bound to cache 2") as paged:
        prompt.allocate_blocks_cache(desc(), BlocksCacheKey(1, 2))
    assert {rows.value.status_code, paged.value.status_code} == {LLMStatusCode.LLM_FAILED}
    assert end.do(picture) == before
    assert [cache.cache_id for cache in held] == [1, 2]


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


def test_a_handle_may_be_dropped_under_a_lock_of_the_library(end: LocalEnd, prompt: KvCacheManager) -> None:
    cache = prompt.allocate_cache(desc())
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
    prompt.remove_cache_key(PLACEHOLDER)
    assert end.do(picture).caches.live == 0


def test_a_copy_of_a_handle_is_the_handle_and_it_is_not_pickled(end: LocalEnd, prompt: KvCacheManager) -> None:
    cache = prompt.allocate_cache(desc())
    for duplicate in (copy.copy, copy.deepcopy):
        twin = duplicate(cache)
        assert twin is cache
        del twin
    with pytest.raises(TypeError, match=r"KvCache 1: .* cannot be pickled"):
        pickle.dumps(cache)
    gc.collect()
    prompt.remove_cache_key(PLACEHOLDER)
    assert end.do(picture).caches.live == 1, "a copy that is dropped must not free the cache"


def test_a_deallocated_handle_and_a_cpu_cache_queue_nothing(end: LocalEnd, prompt: KvCacheManager) -> None:
    first = prompt.allocate_cache(desc())
    prompt.deallocate_cache(first)
    host = KvCache.create_cpu_cache(CacheDesc(1, [1, 1], DataType.DT_UINT8, Placement.HOST), [1])
    del first, host
    gc.collect()
    assert list(prompt._forgotten) == []


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


def test_r06_too_little_memory_is_v1s_own_code_and_changes_nothing(end: LocalEnd, prompt: KvCacheManager) -> None:
    before = end.do(picture)
    with pytest.raises(OutOfMemory) as caught:
        prompt.allocate_cache(CacheDesc(4, [1 << 12, 1 << 40], DataType.DT_UINT8), [CacheKey(1, 7)])
    assert caught.value.status_code is LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
    assert caught.value.requested == 1 << 54
    assert str(1 << 54) in str(caught.value)
    assert end.do(picture) == before


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


def test_a_view_of_memory_without_a_pool_outlives_its_cache(end: LocalEnd) -> None:
    start_end(end, "DECODER", **DIRECT)
    manager = end.world.dd.kv_cache_manager
    cache = manager.allocate_cache(desc())
    view = manager.get_cache_tensors(cache)[0].numpy()
    view[:] = 7
    manager.deallocate_cache(cache)
    end.stop()
    assert (view == 7).all()


# --- copies ----------------------------------------------------------------------------------------------------------


def test_copy_cache_copies_part_of_a_row_and_names_its_request(
    prompt: KvCacheManager, caplog: pytest.LogCaptureFixture
) -> None:
    src, dst = prompt.allocate_cache(desc()), prompt.allocate_cache(desc(rows=3))
    from_, to = fill(src._cache, 1), fill(dst._cache, 2)
    with caplog.at_level(logging.INFO, logger="LLM_DATADIST"):
        prompt.copy_cache(dst, src, 2, 5, 7, 11, 4711)
    assert "req_id=4711" in caplog.text  # interface R9
    prompt.copy_cache(dst, src, dst_batch_index=0, src_batch_index=1)
    for tensor, source in zip(to, from_, strict=True):
        tensor[2, 7:18] = source[5, 7:18]
        tensor[0] = source[1]
    same_bytes(read(dst._cache), to)
    same_bytes(read(src._cache), from_)


def test_copy_blocks_copies_in_the_order_given(prompt: KvCacheManager) -> None:
    cache = prompt.allocate_blocks_cache(desc())
    expected = fill(cache._cache, 3)
    prompt.copy_blocks(cache, {0: [1, 2], 2: [3]})
    for tensor in expected:
        tensor[1], tensor[2], tensor[3] = tensor[0], tensor[0], tensor[0]
    same_bytes(read(cache._cache), expected)


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_swap_blocks_moves_out_and_in_blocks_or_rows(end: LocalEnd, paged: bool, nested: bool) -> None:
    device = StagedDevice()
    start_end(end, "DECODER", device=device)
    manager = end.world.dd.kv_cache_manager
    on_device = manager.allocate_blocks_cache(desc()) if paged else manager.allocate_cache(desc())
    arrays = [np.full((5, 48), 9, np.uint8) for _ in range(4)]
    addrs = [array.ctypes.data for array in arrays]
    host_desc = CacheDesc(4, [5, 48], DataType.DT_UINT8, Placement.HOST)
    host = KvCache.create_cpu_cache(host_desc, [addrs] if nested else addrs)
    assert (host.cache_id, host.per_device_tensor_addrs) == (-1, [addrs])
    here = fill(on_device._cache, 1)
    manager.swap_blocks(on_device, host, {0: 4, 7: 1})
    for array, tensor in zip(arrays, here, strict=True):
        expected = np.full((5, 48), 9, np.uint8)
        expected[4], expected[1] = tensor[0], tensor[7]
        np.testing.assert_array_equal(array, expected)
    manager.swap_blocks(host, on_device, {4: 2, 1: 3, 0: 0})
    for tensor in here:
        tensor[2], tensor[3], tensor[0] = tensor[0].copy(), tensor[7], 9
    same_bytes(read(on_device._cache), here)
    assert end.world.dd.statistics().swap.staging_bytes == 4 * 48  # interface R10


def test_r10_no_staging_memory_is_v1s_own_code(end: LocalEnd) -> None:
    device = StagedDevice()
    start_end(end, "DECODER", device=device)
    manager = end.world.dd.kv_cache_manager
    cache = manager.allocate_blocks_cache(desc())
    memory = np.zeros(8 * 48, np.uint8)
    host_desc = CacheDesc(4, [8, 48], DataType.DT_UINT8, Placement.HOST)
    host = KvCache.create_cpu_cache(host_desc, [memory.ctypes.data] * 4)
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
    if method == "copy_cache":
        cache = manager.allocate_cache(desc())
        args: tuple[Any, ...] = (cache, cache, 1, 0)
    else:
        cache = manager.allocate_blocks_cache(desc())
        args = (cache, {0: [1]})
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


def test_a_copy_of_a_cache_that_is_gone_is_not_found(end: LocalEnd, prompt: KvCacheManager) -> None:
    gone, there = prompt.allocate_cache(desc()), prompt.allocate_cache(desc())
    prompt.deallocate_cache(gone)
    for dst, src in ((gone, there), (there, gone)):
        with pytest.raises(CacheNotFound) as caught:
            prompt.copy_cache(dst, src)
        assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
