"""v1: caches, keys, dropped handles, swaps, tensors, memory that is given back, and what each argument must be
(interface §4, §8, R1, R3, R4, R6, R7, R10, R12, R21)."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import signal
import threading
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from faults.gated import begin, gated_call_v1
from faults.gates import Gate, shut
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    KvCacheManager,
    LLMStatusCode,
    Placement,
    TransferConfig,
    errors,
)
from llm_datadist._deadline import Deadline
from llm_datadist._memory import pool
from llm_datadist.errors import CacheNotFound, KeyInUse, NotInitialized, OutOfMemory, StateError, TransferFailed
from llm_datadist.testing import StagedDevice
from llm_datadist.views import tensor_views
from tests.support import refusals
from tests.support.ends import ChildEnd, LocalEnd
from tests.support.frozen import freeze
from tests.support.layers import Always, addresses
from tests.support.linking import SUCCESS, begin_there, info, link, result_there
from tests.support.memory import user_memory
from tests.support.moves import Use, cache_id, moved, picture, same_bytes, show, wait_until
from tests.support.refusals import MISMATCH, RULE, TYPE, UNLINKED, Spec, Table, bad, each, integer, no_op, refuse
from tests.support.v1 import DIRECT, POOL, desc, kv_call, kv_make, start_end
from tests.support.world import fill, make_config, read, residue, settled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kinds import Pair, World


pytestmark = pytest.mark.covers(
    "KvCache",
    "KvCache: *",
    "KvCacheManager: allocate_blocks_cache allocate_cache copy_blocks copy_cache deallocate_cache",
    "KvCacheManager: get_cache_tensors remove_cache_key swap_blocks",
    "LLMConfig.mem_pool_cfg",
    "llm.MemPoolConfig",
    "KvCacheManager",
    "KvCache: cache_desc create_cpu_cache",
    "KvCacheManager: check_cache_key deallocate_cache is_initialized remove_cache_key",
)

PLACEHOLDER = CacheKey(1, 2**64 - 1)
BLOCKS = BlocksCacheKey(1, 3)
NBYTES = 4 * 4096  # of one cache of desc(): a page per tensor


@pytest.fixture(params=["pool", "direct"])
def prompt(end: LocalEnd, request: pytest.FixtureRequest) -> KvCacheManager:
    """A PROMPT's manager, with a pool and without any."""
    start_end(end, "PROMPT", **(POOL if request.param == "pool" else DIRECT))
    return end.world.dd.kv_cache_manager


def test_the_manager_is_one_object_until_finalize_and_dead_after(end: LocalEnd) -> None:
    end.start("MIX", 1)
    with pytest.raises(StateError, match="cache_manager") as v2_mode:
        _ = end.world.dd.kv_cache_manager
    end.stop()
    start_end(end, "PROMPT")
    datadist = end.world.dd
    manager = datadist.kv_cache_manager
    assert datadist.kv_cache_manager is manager
    assert manager.is_initialized()
    with pytest.raises(StateError, match="kv_cache_manager") as v1_mode:
        _ = datadist.cache_manager
    assert {v1_mode.value.status_code, v2_mode.value.status_code} == {LLMStatusCode.LLM_PARAM_INVALID}
    cache = manager.allocate_cache(desc())
    datadist.finalize()
    assert not manager.is_initialized()
    for name in ("kv_cache_manager", "cache_manager"):
        with pytest.raises(NotInitialized):
            getattr(datadist, name)
    datadist.init(make_config(listen_ip_info="127.0.0.1:0", **POOL))
    assert datadist.kv_cache_manager is not manager
    for name in {name for name in dir(manager) if name[0] != "_"} - {"is_initialized", "check_cache_key"}:
        call = getattr(manager, name)
        with pytest.raises(StateError, match="finalized") as dead:  # interface R21; before any argument is looked at
            call(**dict.fromkeys(signature(call).parameters))
        assert dead.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED, name
    stale_id = cache.cache_id
    del cache  # its id belongs to the old manager and means nothing to the new one
    gc.collect()
    survivor = datadist.kv_cache_manager.allocate_cache(desc())
    assert survivor.cache_id != stale_id
    assert datadist.statistics().caches.live == 1


def test_r03_r04_r06_caches_and_keys_come_and_go_refusals_change_nothing(end: LocalEnd, prompt: KvCacheManager) -> None:
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
    kept, deallocated = prompt.allocate_cache(desc()), prompt.allocate_cache(desc())
    prompt.deallocate_cache(deallocated)
    host = KvCache.create_cpu_cache(CacheDesc(1, [1, 1], DataType.DT_UINT8, Placement.HOST), [1])
    del deallocated, host
    gc.collect()
    assert list(prompt._forgotten) == []
    held = [prompt.allocate_cache(desc()), prompt.allocate_blocks_cache(desc())]
    held.append(prompt.allocate_cache(desc(), [CacheKey(1, 7)]))
    engine = end.world.dd._engine
    assert engine is not None

    def drop() -> None:
        with engine.store.registry._lock:
            held.clear()
            gc.collect()

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert end.do(picture).caches.live == 4, "__del__ frees nothing by itself: it may run under any lock"
    prompt.get_cache_tensors(kept)
    caches = end.do(picture).caches
    assert (caches.live, caches.deferred) == (1, 1)  # the published one waits for its key


def test_a_copy_of_a_handle_is_the_handle_and_it_is_not_pickled(end: LocalEnd) -> None:
    start_end(end, "PROMPT", **DIRECT)
    manager = end.world.dd.kv_cache_manager
    cache = manager.allocate_cache(desc())
    assert copy.copy(cache) is copy.deepcopy(cache) is cache
    with pytest.raises(TypeError, match=r"KvCache 1: .* cannot be pickled"):
        pickle.dumps(cache)
    gc.collect()
    manager.remove_cache_key(PLACEHOLDER)
    assert end.do(picture).caches.live == 1, "a copy that is dropped must not free the cache"


# --- memory ----------------------------------------------------------------------------------------------------------
def test_get_cache_tensors_is_the_memory_of_the_cache_and_outlives_it(end: LocalEnd) -> None:
    start_end(end, "PROMPT", **DIRECT)
    manager = end.world.dd.kv_cache_manager
    cache = manager.allocate_blocks_cache(CacheDesc(3, [4, 2, 3], DataType.DT_INT16))
    tensors = [tensor for index in range(3) for tensor in manager.get_cache_tensors(cache, index)]
    assert [(each.tensor_desc.dtype, each.tensor_desc.shape) for each in tensors] == [
        (DataType.DT_INT16, [4, 2, 3])
    ] * 3
    views = [tensor.numpy() for tensor in tensors]
    assert [(view.shape, view.dtype.name) for view in views] == [((4, 2, 3), "int16")] * 3
    assert [view.ctypes.data for view in views] == cache.per_device_tensor_addrs[0]
    for index, view in enumerate(views):
        view[:] = index
    cache_of_bf16 = manager.allocate_cache(CacheDesc(1, [2, 4], DataType.DT_BF16))
    tensor_views(cache_of_bf16._cache)[0][:] = 0x3F80
    assert [each.numpy().tolist() for each in manager.get_cache_tensors(cache_of_bf16)] == [[[1.0] * 4] * 2]
    manager.deallocate_cache(cache)
    end.stop()
    for index, view in enumerate(views):  # memory without a pool stays mapped for its reader
        assert (view == index).all()


# --- copies and swaps ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
def test_r10_r26_copies_and_swaps_inside_one_end(end: LocalEnd, staged: bool) -> None:
    device = StagedDevice() if staged else None
    start_end(end, "DECODER", device=device)
    manager = end.world.dd.kv_cache_manager
    caches = [
        manager.allocate_cache(desc()),
        manager.allocate_cache(desc(rows=3)),
        manager.allocate_blocks_cache(desc()),
    ]
    host_desc = CacheDesc(4, [8, 48], DataType.DT_UINT8, Placement.HOST)
    addrs = user_memory(end.world, "host", host_desc)
    for given in (addrs, [addrs]):  # one list for the one device will do
        caches.append(KvCache.create_cpu_cache(host_desc, given))
        assert (caches[-1].cache_id, caches[-1].per_device_tensor_addrs) == (-1, [addrs])
    rows, few, paged, host, _ = caches
    src, dst, kv, cpu = (fill(cache._cache, seed) for seed, cache in enumerate(caches[:4]))

    manager.copy_cache(few, rows, 2, 7)
    manager.copy_cache(few, rows, 0, 5, 9, 20)
    dst = moved(dst, src, [(2, 7)])
    for target, source in zip(dst, src, strict=True):
        target[0, 9:29] = source[5, 9:29]
    manager.copy_blocks(paged, {4: [1, 2, 7], 0: [3], 3: [5]})  # a chain: block 0 arrives everywhere
    kv = moved(moved(kv, kv, [(1, 4), (2, 4), (7, 4), (3, 0)]), kv, [(5, 0)])
    manager.swap_blocks(rows, host, {6: 4, 7: 1})  # out of rows, into blocks
    cpu = moved(cpu, src, [(4, 6), (1, 7)])
    assert end.world.dd.statistics().swap.staging_bytes == 0
    manager.swap_blocks(host, paged, {3: 0, 4: 7})
    kv = moved(kv, cpu, [(0, 3), (7, 4)])
    # Interface R10: four buffers of a block's size.
    assert end.world.dd.statistics().swap.staging_bytes == (4 * 48 if device else 0)
    for cache, wanted in zip(caches, (src, dst, kv, cpu, cpu), strict=True):
        same_bytes(read(cache._cache), wanted)
    manager.deallocate_cache(few)
    for two in ((rows, few), (few, rows)):
        with pytest.raises(CacheNotFound):
            manager.copy_cache(*two)
    if device is not None:
        wide = manager.allocate_blocks_cache(desc(1, 2, 4096))
        one = CacheDesc(1, [2, 4096], DataType.DT_UINT8, Placement.HOST)
        larger = KvCache.create_cpu_cache(one, user_memory(end.world, "larger", one))
        device.refuse_after(device.allocated_bytes - 4 * 48)
        with pytest.raises(OutOfMemory, match="staging") as caught:  # v1's own code
            manager.swap_blocks(larger, wide, {0: 0})
        assert caught.value.status_code is LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY


@pytest.mark.parametrize("method", ["copy_cache", "copy_blocks"])
def test_r06_r09_a_local_copy_that_times_out_has_v1s_code(end: LocalEnd, method: str, tmp_path: Path) -> None:
    start_end(end, "DECODER", sync_kv_timeout=50)
    manager = end.world.dd.kv_cache_manager
    rows = method == "copy_cache"
    cache = manager.allocate_cache(desc()) if rows else manager.allocate_blocks_cache(desc())
    args: tuple[Any, ...] = (cache, cache, 1, 0, 0, -1, 4711) if rows else (cache, {0: [1]})
    before = fill(cache._cache, 1)
    with shut(end.world.dd, "hold", tmp_path) as gate:
        collect = begin(end, lambda world: getattr(world.dd.kv_cache_manager, method)(*args))
        gate.wait()
        passed = Deadline(50)  # made after the call's own
        assert passed.poll(passed.expired)
        gate.open()
        with pytest.raises(errors.DeadlineExceeded) as caught:
            collect()
    assert caught.value.status_code is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    assert ("req_id=4711" in str(caught.value)) == rows
    same_bytes([tensor[2:] for tensor in read(cache._cache)], [tensor[2:] for tensor in before])


# --- freed memory is unmapped, but never under a peer that may still be at it -----------------------------------------
def test_memory_that_is_deallocated_under_a_reader_waits_for_it(local_pair: Pair, tmp_path: Path) -> None:
    prompt, decoder = local_pair.prompt, local_pair.decoder
    local_pair.start(**DIRECT)
    prompt.do(kv_make, "kv", desc(), 1, (), True, BLOCKS)
    decoder.do(kv_make, "kv", desc(), 2, (), True)
    args = ("pull_blocks", BLOCKS, Use("kv"), [0, 1], [2, 3])  # stops when it has announced itself and moved nothing
    decoder.do(begin_there, "pull", gated_call_v1, 1, "before copy", tmp_path, *args)
    gate = Gate(tmp_path)
    gate.wait()
    prompt.do(kv_call, "deallocate_cache", Use("kv"))
    assert (prompt.do(picture).caches.live, prompt.do(picture).quarantined_bytes) == (0, NBYTES)
    gate.open()
    assert isinstance(decoder.do(result_there, "pull"), TransferFailed)
    wait_until(lambda: prompt.do(picture).quarantined_bytes == 0)
    assert prompt.do(picture).pools[0].used_bytes == 0


@pytest.fixture
def sending(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ChildEnd, LocalEnd]]:
    """A PROMPT in a child, stopped right before it writes into "kv", rows or blocks, of the DECODER here; no pools."""
    before = residue()
    prompt, decoder = ChildEnd("prompt"), LocalEnd("decoder")
    try:
        extra = {"llm.PeerTimeout": "600"}
        start_end(prompt, "PROMPT", 1, extra=extra, **DIRECT)
        start_end(decoder, "DECODER", 2, extra=extra, sync_kv_timeout=500, **DIRECT)
        assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
        for seed, end in enumerate((prompt, decoder)):
            end.do(kv_make, "kv", desc(), seed, (), request.param)
        prompt.begin(_send, decoder.do(addresses, "kv"), tmp_path)
        Gate(tmp_path).wait()
        freeze(prompt)
        yield prompt, decoder
    finally:
        prompt.kill()
        decoder.stop()
        pool._kept_mapped.clear()
        assert settled(before) == before


def _send(world: World, addrs: list[int], folder: Path) -> Any:
    with shut(world.dd, "before write", folder, peer=2):
        return kv_call(world, "transfer_cache_async", Use("kv"), Always(), [TransferConfig(2, addrs)]).get_results()


@pytest.mark.parametrize(("sending", "quarantined"), [(False, 0), (True, NBYTES)], indirect=["sending"])
def test_r12_memory_that_a_killed_prompt_wrote_comes_back(sending: tuple[ChildEnd, LocalEnd], quarantined: int) -> None:
    """The place of a row is pinned for its writer, that of blocks is not."""
    prompt, decoder = sending
    decoder.do(kv_call, "deallocate_cache", Use("kv"))
    assert decoder.do(picture).quarantined_bytes == quarantined
    other = decoder.do(kv_make, "other", desc(), 4)  # in memory of its own
    assert decoder.do(picture).pools[0].used_bytes == 2 * NBYTES
    prompt.signal(signal.SIGKILL)
    wait_until(lambda: decoder.do(picture).pools[0].used_bytes == NBYTES)
    assert decoder.do(picture).quarantined_bytes == 0
    same_bytes(decoder.do(show, "other"), other)


@pytest.mark.parametrize("sending", [True], indirect=True)
def test_memory_under_a_writer_stays_mapped(
    sending: tuple[ChildEnd, LocalEnd], caplog: pytest.LogCaptureFixture
) -> None:
    decoder = sending[1]
    address, before = decoder.world.caches["kv"].tensor_addrs[0], decoder.do(show, "kv")
    with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
        decoder.stop()
    assert "registered memory is still in use by cluster 1" in caplog.text
    assert "stay mapped" in caplog.text
    assert [view.ctypes.data for view in pool._kept_mapped] == [address]
    assert np.array_equal(pool._kept_mapped[0][:48], before[0][0])


def test_a_handle_dropped_during_its_transfer_frees_nothing_before_the_end(local_pair: Pair, tmp_path: Path) -> None:
    local_pair.start(**DIRECT)
    prompt, decoder = local_pair.prompt, local_pair.decoder
    src = prompt.do(kv_make, "kv", desc(), 1)
    decoder.do(kv_make, "kv", desc(), 2)
    number = prompt.do(cache_id, "kv")
    prompt.do(begin_there, "send", _send, decoder.do(addresses, "kv"), tmp_path)
    gate = Gate(tmp_path)
    try:
        gate.wait()
        del prompt.world.memory["kv kv"], prompt.world.caches["kv"]  # type: ignore[attr-defined]
        # Not at once: the thread that sends may still be on its way out of the call that took the handle.
        wait_until(lambda: prompt.do(_given_back, number))
        assert prompt.do(picture).pools[0].used_bytes == NBYTES
    finally:
        gate.open()
        results = prompt.do(result_there, "send")
    assert results == [0]
    wait_until(lambda: prompt.do(picture).pools[0].used_bytes == 0)
    same_bytes([each[:1] for each in decoder.do(show, "kv")], [each[:1] for each in src])


def _given_back(world: World, number: int) -> bool:
    """Make a call, which gives dropped caches back, and return whether that one is gone."""
    world.dd.kv_cache_manager.remove_cache_key(PLACEHOLDER)
    assert world.dd._engine is not None
    try:
        world.dd._engine.store.registry.lookup(number)
    except CacheNotFound:
        return True
    return False


KEY = CacheKey(1, 10)
BY_ID = CacheKeyByIdAndIndex(1, 1, 0)
NO_ID, TWO_IDS = CacheKey(1, 2**64 - 1), CacheKey(1, 5, 0, 6)
KV, PAGED, CPU = Use("kv"), Use("paged"), Use("cpu")


def host(tensors: int) -> CacheDesc:
    return CacheDesc(tensors, [8, 48], DataType.DT_UINT8, Placement.HOST)


HOST = host(4)
KV_CACHE: Final = Spec((1, desc(), Cache(1, desc(), [1, 2, 3, 4])))
ON_DEVICE: Final = Spec(KV_CACHE.wrong, (RULE, "{}: placement is HOST, only DEVICE", CPU))
KV_ROWS: Final = Spec(KV_CACHE.wrong, *ON_DEVICE.inner, (RULE, "{}: a blocks cache", PAGED))
KV_BLOCKS: Final = Spec(
    KV_CACHE.wrong, *ON_DEVICE.inner, (RULE, "not a blocks cache", KV), (refusals.GONE, "id", Use("freed"))
)
CACHE_KEY: Final = Spec((7, "key", BLOCKS, BY_ID))
DESCRIPTOR: Final = Spec(
    ("desc", 1, KEY),
    (RULE, "shape", desc(rows=0), desc(rows=-1)),
    (RULE, "num_tensors=0", desc(0)),
    (RULE, "{}: placement is HOST, only DEVICE", HOST),
)
KEYS: Final = Spec(
    (KEY, {KEY}, "keys"), (TYPE, "{}[1]", [KEY, BLOCKS], [KEY, 7]), (refusals.NONE, "{}[1]", [KEY, None])
)
LIST: Final = Spec((*refusals.BLOCK_LIST.wrong, (0, 5), np.zeros(2, np.int64)), *refusals.BLOCK_LIST.inner)
ROW: Final = integer(0, 2**32 - 1, 6)
SIZE: Final = Spec(("8", 8.0), (RULE, "must be -1 or above 0", 0, -2), (RULE, "{}", 49, 2**63))
OFFSET: Final = integer(0, 2**64 - 1, none_ok=True)

#: Calls of the end that serves.
PROMPT: Final = (
    Table(
        "v1.allocate_cache",
        {"cache_desc": desc()},
        {"cache_desc": DESCRIPTOR, "cache_keys": KEYS},
        bad(RULE, "2 keys", "1", cache_desc=desc(rows=1), cache_keys=[CacheKey(1, 20), CacheKey(1, 21)]),
    ),
    Table(
        "v1.allocate_blocks_cache",
        {"cache_desc": desc(), "blocks_cache_key": None},
        {"cache_desc": DESCRIPTOR, "blocks_cache_key": Spec((KEY, BY_ID, 7), none_ok=True)},
    ),
    Table("v1.deallocate_cache", {"cache": KV}, {"cache": ON_DEVICE}),
    Table("v1.remove_cache_key", {"cache_key": KEY}, {"cache_key": CACHE_KEY}),
    Table(
        "v1.check_cache_key",
        {"cache_key": KEY},
        {"cache_key": CACHE_KEY},
        *each(RULE, "exactly one", cache_key=[NO_ID, TWO_IDS]),
    ),
)
#: Calls of the end that pulls.
DECODER: Final = (
    Table(
        "v1.pull_cache",
        {"cache_key": KEY, "kv_cache": KV},
        {
            "cache_key": Spec((10, "key", BLOCKS)),
            "kv_cache": KV_ROWS,
            "batch_index": ROW,
            "size": SIZE,
            "src_cache_offset": OFFSET,
            "dst_cache_offset": OFFSET,
            **refusals.LAYERS,
        },
        bad(RULE, "dst_cache_offset=48", dst_cache_offset=48),
        bad(RULE, "dst_cache_offset=41", size=8, dst_cache_offset=41),
        bad(MISMATCH, "41", size=8, src_cache_offset=41),
        bad(MISMATCH, "1", src_cache_offset=1),  # size -1 is the whole destination row
        *each(RULE, "exactly one", cache_key=[NO_ID, TWO_IDS]),
        bad(UNLINKED, "cluster 77", cache_key=CacheKey(77, 10)),
        bad(refusals.GONE, "99", cache_key=CacheKeyByIdAndIndex(1, 99)),
        bad(refusals.GONE, "row 6", cache_key=CacheKeyByIdAndIndex(1, 1, 6)),
        bad(refusals.GONE, "req_id=11", cache_key=CacheKey(1, 11)),
        bad(refusals.GONE, "no cache with id", kv_cache=Use("freed rows")),
    ),
    Table(
        "v1.pull_blocks",
        {"prompt_cache_key": BLOCKS, "decoder_kv_cache": PAGED, "prompt_blocks": [0, 5], "decoder_blocks": [1, 2]},
        {
            "prompt_cache_key": Spec((3, KEY, BY_ID)),
            "decoder_kv_cache": KV_BLOCKS,
            "prompt_blocks": LIST,
            "decoder_blocks": LIST,
            **refusals.LAYERS,
        },
        *each(RULE, "equal lengths", prompt_blocks=[[0]], decoder_blocks=[[0]]),
        bad(RULE, "prompt_blocks is empty", prompt_blocks=[], decoder_blocks=[]),
        bad(MISMATCH, "block sizes differ", decoder_kv_cache=Use("other size")),
        bad(UNLINKED, "cluster 77", prompt_cache_key=BlocksCacheKey(77, 3)),
        bad(refusals.GONE, "model_id=99", prompt_cache_key=BlocksCacheKey(1, 99)),
    ),
    Table(
        "v1.copy_cache",
        {"dst": KV, "src": KV, "src_batch_index": 1},
        {
            "dst": KV_ROWS,
            "src": KV_ROWS,
            "dst_batch_index": ROW,
            "src_batch_index": ROW,
            "offset": integer(0, 2**64 - 1, 48),
            "size": SIZE,
            "req_id": OFFSET,
        },
    ),
    Table(
        "v1.copy_blocks",
        {"cache": PAGED, "copy_block_info": {0: [1]}},
        {"cache": KV_BLOCKS, "copy_block_info": refusals.COPY_PAIRS},
        no_op(copy_block_info={}),
        no_op(copy_block_info={1: []}),
    ),
    Table(
        "v1.swap_blocks",
        {"src": PAGED, "dst": CPU, "src_to_dst": {0: 1}},
        {"src": KV_CACHE, "dst": KV_CACHE, "src_to_dst": refusals.SWAP_PAIRS},
        bad(MISMATCH, "block sizes differ: blocks of src have", "of dst", dst=Use("other size")),
        bad(MISMATCH, "num_tensors differ: src has 4, dst 3", dst=Use("cpu of 3")),
        bad(RULE, "src and dst are both on DEVICE", dst=KV),
        bad(RULE, "src and dst are both on HOST", src=CPU),
        bad(RULE, "dst: tensor_addrs[0]=0", dst=Use("cpu at 0")),
        bad(RULE, "src: it has no memory any more (deallocated)", src=Use("freed")),
        no_op(src_to_dst={}),
    ),
    Table(
        "v1.get_cache_tensors",
        {"cache": KV, "tensor_index": 0},
        {"cache": KV_CACHE, "tensor_index": integer(-(2**31), 2**31 - 1, -1, 4)},
        bad(RULE, "deallocated", cache=Use("freed")),
    ),
)
#: What is named, the call, its arguments, and the roles that may not do it.
ROLES: Final[list[tuple[str, str, dict[str, Any], str]]] = [
    ("cache_keys", "allocate_cache", {"cache_desc": desc(), "cache_keys": [KEY]}, "DECODER MIX"),
    ("cache_keys", "allocate_cache", {"cache_desc": desc(), "cache_keys": [NO_ID]}, "DECODER MIX"),
    ("blocks_cache_key", "allocate_blocks_cache", {"cache_desc": desc(), "blocks_cache_key": BLOCKS}, "DECODER"),
    ("remove_cache_key", "remove_cache_key", {"cache_key": KEY}, "DECODER MIX"),
    ("pull_cache", "pull_cache", DECODER[0].good, "PROMPT MIX"),
    ("pull_blocks", "pull_blocks", DECODER[1].good, "PROMPT MIX"),
]


def _more(world: World) -> None:
    """Make what the tables name beside the cache "kv"."""
    kv_make(world, "paged", desc(rows=6), 4, (), True, BLOCKS if world.dd.cluster_id == 1 else None)
    kv_make(world, "other size", desc(rows=6, stride=32), 5, (), True)
    kv_make(world, "freed", desc(rows=6), 6, (), True)
    kv_make(world, "freed rows", desc(rows=6), 6)
    for name in ("freed", "freed rows"):
        kv_call(world, "deallocate_cache", Use(name))
    memory = world.memory["host memory"] = np.zeros(8 * 48, np.uint8)
    address = memory.ctypes.data
    world.memory["kv cpu"] = KvCache.create_cpu_cache(HOST, [address] * 4)
    world.memory["kv cpu of 3"] = KvCache.create_cpu_cache(host(3), [address] * 3)
    world.memory["kv cpu at 0"] = KvCache.create_cpu_cache(HOST, [0] * 4)


@pytest.fixture
def ready(local_pair: Pair) -> Pair:
    """A linked pair; each end has all that the tables name, the prompt's "kv" and "paged" with a key."""
    local_pair.start(**POOL)
    local_pair.prompt.do(kv_make, "kv", desc(rows=6), 1, (KEY,))
    local_pair.decoder.do(kv_make, "kv", desc(rows=6), 3)
    for end in (local_pair.prompt, local_pair.decoder):
        end.do(_more)
    return local_pair


def test_r01_a_wrong_argument_is_a_typed_error_and_nothing_happens(ready: Pair) -> None:
    for table in PROMPT:
        refuse((ready.prompt, ready.decoder), table)
    for table in DECODER:
        refuse((ready.decoder, ready.prompt), table)


@pytest.mark.parametrize("role", ["PROMPT", "DECODER", "MIX"])
def test_what_another_role_does_is_refused(end: LocalEnd, role: str) -> None:
    start_end(end, role)
    end.do(kv_make, "kv", desc(), 1)
    end.do(kv_make, "paged", desc(), 2, (), True)
    for name, method, arguments, roles in ROLES:
        if role in roles:
            refuse([end], Table(f"v1.{method}", arguments, {}, bad(RULE, name, role)))


def test_the_call_of_each_table_is_good_unless_a_row_spoils_it(ready: Pair) -> None:
    """What is pulled ends the key, and so does what is given back: they come last."""
    nothing: dict[str, Any] = dict.fromkeys(("src_layer_range", "dst_layer_range"))
    nothing |= {"src_cache_offset": None, "dst_cache_offset": None}
    made, given_back = (PROMPT[0], PROMPT[1], PROMPT[4]), PROMPT[2:4]
    for table in (*made, *reversed(DECODER), *given_back):
        end = ready.decoder if table in DECODER else ready.prompt
        assert end.do(refusals.attempt, table, [nothing if table is DECODER[0] else {}]) == [None], table.call
    KvCacheManager.check_cache_key(CacheKey(1, 2**64 - 1, 0, 5))
    methods = {name for name in dir(KvCacheManager) if not name.startswith("_")} - {"is_initialized"}
    # the other one: test_v1_pulls.py
    assert {table.call[3:] for table in (*PROMPT, *DECODER)} == methods - {"transfer_cache_async"}


def test_create_cpu_cache_refuses() -> None:
    """What one list must hold: tests/unit/test_types.py."""
    good = [1, 2, 3, 4]
    addrs = Spec(
        (tuple(good),),
        (TYPE, "{}", [tuple(good)], [[1, 2, 3, "4"]]),
        (RULE, "{} is empty", []),
        (RULE, "0 addresses for num_tensors=4", [[]]),
        (RULE, "3 addresses for num_tensors=4", good[:3]),
        (RULE, "should be consistent", [[1, 2], 3, 4], [3, [1, 2]]),
        (RULE, "2 lists", [good, good]),
    )
    specs = {"cache_desc": Spec(("desc",), (RULE, "HOST", desc())), "addrs": addrs}
    refusals.refuse_each(KvCache.create_cpu_cache, {"cache_desc": HOST, "addrs": good}, specs)
