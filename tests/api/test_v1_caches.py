"""v1: caches, keys, dropped handles, swaps, tensors, memory that is given back, what each argument must be; between two
ends links of all or none, roles, keys that are consumed, offsets, memory without a pool, transfers to addresses
(interface §3.6, §3.7, §4, §6.14, §8, B2.4, R1, R3 to R7, R10, R12, R18, R21, R22)."""

import copy
import gc
import logging
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from faults.gated import begin, gated_call_v1
from faults.gates import Gate, shut
from faults.strangers import silent_port
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    KvCacheManager,
    LLMException,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
    errors,
)
from llm_datadist.errors import CacheNotFound, NotInitialized, NotLinked, OutOfMemory, ParamError, StateError
from llm_datadist.views import tensor_views
from tests.support import ranks, refusals
from tests.support.ends import ChildEnd, LocalEnd, freeze, frozen
from tests.support.kinds import Bytes, End, Pair, World
from tests.support.layers import Always, Gated, addresses
from tests.support.linking import (
    SUCCESS,
    alone,
    begin_there,
    info,
    link,
    links,
    redials,
    result_there,
    switch,
    unlink,
    vanish,
)
from tests.support.memory import user_memory
from tests.support.moves import Use, cache_id, in_time, moved, picture, refused, same_bytes, show, wait_until
from tests.support.probe import Probe, kept_mapped, lock_of
from tests.support.ranks import drop, host, join, status
from tests.support.refusals import MISMATCH, RULE, TYPE, UNLINKED, Spec, Table, bad, each, integer, no_op, refuse
from tests.support.v1 import DIRECT, POOL, desc, kv_call, kv_make, start_end
from tests.support.world import fill, make_config, read, residue, settled

pytestmark = [
    pytest.mark.covers(
        "KvCache",
        "KvCacheManager",
        "KvCache: *",
        "KvCacheManager: allocate_blocks_cache allocate_cache copy_blocks copy_cache deallocate_cache",
        "KvCacheManager.get_cache_tensors",
        "KvCacheManager: remove_cache_key swap_blocks check_cache_key is_initialized pull_blocks pull_cache",
        "KvCacheManager: transfer_cache_async",
        "LLMConfig.mem_pool_cfg",
        "llm.MemPoolConfig",
        "LLMDataDist: check_link_status link_clusters",
    ),
    pytest.mark.gpu,
]

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
    with pytest.raises(errors.KeyInUse, match="bound to cache 3") as rows:
        prompt.allocate_cache(desc(), [CacheKey(1, 6), CacheKey(1, 7)])
    with pytest.raises(errors.KeyInUse, match="bound to cache 2") as paged:
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


def memory_of(cache: KvCache) -> Cache:
    """Return the memory of a v1 cache as the shared helpers look at it."""
    return Cache(cache.cache_id, cache.cache_desc, cache.per_device_tensor_addrs[0])


# --- handles that are dropped ----------------------------------------------------------------------------------------
def test_a_dropped_handle_gives_its_cache_back_at_the_next_call(end: LocalEnd, prompt: KvCacheManager) -> None:
    kept, deallocated = prompt.allocate_cache(desc()), prompt.allocate_cache(desc())
    prompt.deallocate_cache(deallocated)
    host = KvCache.create_cpu_cache(CacheDesc(1, [1, 1], DataType.DT_UINT8, Placement.HOST), [1])
    del deallocated, host
    gc.collect()
    assert Probe.dropped(prompt) == []
    held = [prompt.allocate_cache(desc()), prompt.allocate_blocks_cache(desc())]
    held.append(prompt.allocate_cache(desc(), [CacheKey(1, 7)]))
    probe = end.world.probe

    def drop() -> None:
        with lock_of(probe.engine.caches.registry):
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


@pytest.mark.gpu(True)
def test_tensors_of_a_cache_in_a_gpu_are_copies_of_its_bytes(end: LocalEnd) -> None:
    start_end(end, "DECODER")
    manager = end.world.dd.kv_cache_manager
    cache = manager.allocate_cache(desc())
    written = fill(memory_of(cache), 1)
    for index, wanted in enumerate(written):
        (shown,) = manager.get_cache_tensors(cache, index)
        same_bytes([shown.numpy().reshape(wanted.shape)], [wanted])
        shown.numpy()[:] = 0
    same_bytes(read(memory_of(cache)), written)


@pytest.mark.gpu(False)
def test_a_copy_of_a_handle_is_the_handle_and_tensors_are_the_memory_of_the_cache_and_outlive_it(end: LocalEnd) -> None:
    """Regression: a copy of a handle owned the memory too, and gave its cache back."""
    start_end(end, "PROMPT", **DIRECT)
    manager = end.world.dd.kv_cache_manager
    cache = manager.allocate_cache(desc())
    assert copy.copy(cache) is copy.deepcopy(cache) is cache
    with pytest.raises(TypeError, match=r"KvCache 1: .* cannot be pickled"):
        pickle.dumps(cache)
    gc.collect()
    manager.remove_cache_key(PLACEHOLDER)
    assert end.do(picture).caches.live == 1, "a copy that is dropped must not free the cache"
    cache = manager.allocate_blocks_cache(CacheDesc(3, [4, 2, 3], DataType.DT_INT16))
    tensors = [tensor for index in range(3) for tensor in manager.get_cache_tensors(cache, index)]
    kinds = [(each.tensor_desc.dtype, each.tensor_desc.shape) for each in tensors]
    assert kinds == [(DataType.DT_INT16, [4, 2, 3])] * 3
    views = [tensor.numpy() for tensor in tensors]
    assert [(view.shape, view.dtype.name) for view in views] == [((4, 2, 3), "int16")] * 3
    assert [view.ctypes.data for view in views] == cache.per_device_tensor_addrs[0]
    for index, view in enumerate(views):
        view[:] = index
    cache_of_bf16 = manager.allocate_cache(CacheDesc(1, [2, 4], DataType.DT_BF16))
    tensor_views(memory_of(cache_of_bf16))[0][:] = 0x3F80
    assert [each.numpy().tolist() for each in manager.get_cache_tensors(cache_of_bf16)] == [[[1.0] * 4] * 2]
    manager.deallocate_cache(cache)
    end.stop()
    for index, view in enumerate(views):  # memory without a pool stays mapped for its reader
        assert (view == index).all()


# --- copies and swaps ------------------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_r10_r26_copies_and_swaps_inside_one_end(end: LocalEnd) -> None:
    start_end(end, "DECODER")
    manager = end.world.dd.kv_cache_manager
    caches = [manager.allocate_cache(desc()), manager.allocate_cache(desc(rows=3))]
    caches.append(manager.allocate_blocks_cache(desc()))
    host_desc = CacheDesc(4, [8, 48], DataType.DT_UINT8, Placement.HOST)
    addrs = user_memory(end.world, "host", host_desc)
    for given in (addrs, [addrs]):  # one list for the one device will do
        caches.append(KvCache.create_cpu_cache(host_desc, given))
        assert (caches[-1].cache_id, caches[-1].per_device_tensor_addrs) == (-1, [addrs])
    rows, few, paged, host, _ = caches
    src, dst, kv, cpu = (fill(memory_of(cache), seed) for seed, cache in enumerate(caches[:4]))

    manager.copy_cache(few, rows, 2, 7)
    manager.copy_cache(few, rows, 0, 5, 9, 20)
    dst = moved(dst, src, [(2, 7)])
    for target, source in zip(dst, src, strict=True):
        target[0, 9:29] = source[5, 9:29]
    manager.copy_blocks(paged, {4: [1, 2, 7], 0: [3], 3: [5]})  # a chain: block 0 arrives everywhere
    kv = moved(moved(kv, kv, [(1, 4), (2, 4), (7, 4), (3, 0)]), kv, [(5, 0)])
    manager.swap_blocks(rows, host, {6: 4, 7: 1})  # out of rows, into blocks
    cpu = moved(cpu, src, [(4, 6), (1, 7)])
    manager.swap_blocks(host, paged, {3: 0, 4: 7})
    kv = moved(kv, cpu, [(0, 3), (7, 4)])
    for cache, wanted in zip(caches, (src, dst, kv, cpu, cpu), strict=True):
        same_bytes(read(memory_of(cache)), wanted)
    manager.deallocate_cache(few)
    for two in ((rows, few), (few, rows)):
        with pytest.raises(CacheNotFound):
            manager.copy_cache(*two)


@pytest.mark.parametrize("method", ["copy_cache", "copy_blocks"])
def test_r06_r09_a_local_copy_that_times_out_has_v1s_code(end: LocalEnd, method: str, tmp_path: Path) -> None:
    start_end(end, "DECODER", sync_kv_timeout=50)
    manager = end.world.dd.kv_cache_manager
    rows = method == "copy_cache"
    cache = manager.allocate_cache(desc()) if rows else manager.allocate_blocks_cache(desc())
    args: tuple[Any, ...] = (cache, cache, 1, 0, 0, -1, 4711) if rows else (cache, {0: [1]})
    before = fill(memory_of(cache), 1)
    with shut(end.world.dd, "hold", tmp_path) as gate:
        collect = begin(end, lambda world: getattr(world.dd.kv_cache_manager, method)(*args))
        gate.wait()
        time.sleep(0.06)  # the call began before, and has 50 ms
        gate.open()
        with pytest.raises(errors.DeadlineExceeded) as caught:
            collect()
    assert (caught.value.status_code, caught.value.phase) == (LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT, "copy")
    assert (method in str(caught.value), "req_id=4711" in str(caught.value)) == (True, rows)
    same_bytes(*([np.delete(tensor, 1, 0) for tensor in each] for each in (read(memory_of(cache)), before)))


# --- freed memory is unmapped, but never under a peer that may still be at it -----------------------------------------
def test_memory_that_is_deallocated_under_a_reader_waits_for_it(local_pair: Pair, tmp_path: Path) -> None:
    prompt, decoder = local_pair.start(**DIRECT)
    prompt.do(kv_make, "kv", desc(), 1, (), True, BLOCKS)
    decoder.do(kv_make, "kv", desc(), 2, (), True)
    args = ("pull_blocks", BLOCKS, Use("kv"), [0, 1], [2, 3])  # stops when it has announced itself and compared nothing
    decoder.do(begin_there, "pull", gated_call_v1, 1, "before copy", tmp_path, *args)
    gate = Gate(tmp_path)
    gate.wait()
    prompt.do(kv_call, "deallocate_cache", Use("kv"))
    assert (prompt.do(picture).caches.live, prompt.do(picture).quarantined_bytes) == (0, NBYTES)
    gate.open()
    assert isinstance(decoder.do(result_there, "pull"), errors.CacheNotFound)
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
        kept_mapped.clear()
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
    (text,) = [each for each in caplog.messages if "finalize" in each]
    assert f"registered memory is still in use by cluster 1 (pid {sending[0].pid} on " in text
    assert "\n" not in text
    assert "stay mapped" in caplog.text
    (kept,) = kept_mapped
    assert isinstance(kept, np.ndarray)
    assert kept.ctypes.data == address
    assert np.array_equal(kept[:48], before[0][0])


def test_a_handle_dropped_during_its_transfer_frees_nothing_before_the_end(local_pair: Pair, tmp_path: Path) -> None:
    prompt, decoder = local_pair.start(**DIRECT)
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
    try:
        world.probe.engine.caches.registry.lookup(number)
    except CacheNotFound:
        return True
    return False


KEY = CacheKey(1, 10)
BY_ID = CacheKeyByIdAndIndex(1, 1, 0)
NO_ID, TWO_IDS = CacheKey(1, 2**64 - 1), CacheKey(1, 5, 0, 6)
KV, PAGED, CPU = Use("kv"), Use("paged"), Use("cpu")


def host_desc(tensors: int) -> CacheDesc:
    return CacheDesc(tensors, [8, 48], DataType.DT_UINT8, Placement.HOST)


HOST = host_desc(4)
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
            "prompt_blocks": refusals.BLOCK_LIST,
            "decoder_blocks": refusals.BLOCK_LIST,
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
    world.memory["kv cpu of 3"] = KvCache.create_cpu_cache(host_desc(3), [address] * 3)
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
    # the other one: test_v1_caches.py
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


OK, INVALID = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_PARAM_INVALID
REPEAT, FAILED = LLMStatusCode.LLM_REPEAT_REQUEST, LLMStatusCode.LLM_LINK_FAILED
NOT_YET, BUSY = LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_LINK_BUSY
ALREADY, WAITED = LLMStatusCode.LLM_ALREADY_LINK, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
LISTENING = {"llm.listenIpInfo": "127.0.0.1:0"}
ROW_KEYS = (CacheKey(1, 10, 1), CacheKey(1, 11, 1))


def probe(world: World, cluster_id: int) -> None:
    world.dd.check_link_status(cluster_id)


@pytest.fixture
def prompts() -> Iterator[list[LocalEnd]]:
    """Three PROMPTs in this process, clusters 11, 12 and 13."""
    ends = [LocalEnd(f"prompt {number}") for number in (11, 12, 13)]
    for number, end in zip((11, 12, 13), ends, strict=True):
        start_end(end, "PROMPT", number, **DIRECT)
    yield ends
    for end in ends:
        end.stop()


def test_r19_all_clusters_of_a_call_are_linked_or_none(end: LocalEnd, prompts: list[LocalEnd]) -> None:
    start_end(end, "DECODER", 1, **DIRECT)
    clusters = [info(each.cluster_id, each.port) for each in prompts]
    assert end.do(link, clusters) == (OK, [OK] * 3)
    for prompt in prompts:
        end.do(probe, prompt.cluster_id)
    assert end.do(link, clusters[:1]) == (FAILED, [ALREADY])
    assert sorted(end.do(links)) == [11, 12, 13]
    assert end.do(unlink, clusters[:2]) == (OK, [OK] * 2)
    alone(*prompts[:2])
    wrong = info(99, prompts[1].port)
    learned = info(None, prompts[0].port)  # its id is learned, and it is given up all the same
    assert end.do(link, [learned, wrong]) == (FAILED, [FAILED, FAILED])
    with silent_port() as port:  # what does not answer is a time-out of v1, and more than 16 are not too many
        codes = end.do(link, [clusters[0], *(info(100 + i, port) for i in range(20))], 300)
    assert codes == (FAILED, [FAILED, *[WAITED] * 20])
    assert sorted(end.do(links)) == [13]
    alone(*prompts[:2])
    assert end.do(link, [learned]) == SUCCESS
    end.do(probe, 11)


def test_a_call_that_cannot_be_links_nothing(end: LocalEnd, prompts: list[LocalEnd]) -> None:
    clusters = [info(11, prompts[0].port), info(12, prompts[1].port)]
    for role in ("PROMPT", "MIX"):
        start_end(end, role, 1, **DIRECT)
        assert end.do(link, clusters) == (INVALID, [INVALID] * 2)
        with pytest.raises(ParamError, match="only a DECODER"):
            end.do(probe, 11)
        assert end.do(links) == {}
        end.stop()
    start_end(end, "DECODER", 1, **DIRECT)
    for local, remote in ((0, 1), (1, 0), (2, 1), (1, 2), (2, 2), (0, 0)):  # one for the one device
        bad = info(12, *[prompts[1].port] * remote, local=None)
        for _ in range(local):
            bad.append_local_ip_info("127.0.0.1", 0)
        assert end.do(link, [clusters[0], bad]) == (INVALID, [FAILED, INVALID])
        assert end.do(links) == {}
    assert end.do(link, []) == (INVALID, [])
    assert str(INVALID.error) == "clusters is empty: at least one LLMClusterInfo is needed"
    refused = end.do(link, [*clusters, clusters[0]])
    assert refused == (REPEAT, [FAILED, FAILED, REPEAT])
    twice = "clusters[2]: cluster 11 is in the list twice"
    assert [str(status.error) for status in refused[1]] == ["None", "None", twice]
    assert end.do(links) == {}
    for force in (False, True):
        assert end.do(unlink, clusters, 5000, force) == (OK, [NOT_YET] * 2)
        assert end.do(link, clusters[:1]) == SUCCESS
        assert end.do(unlink, [clusters[1], clusters[0], info(99)], 5000, force) == (OK, [NOT_YET, OK, NOT_YET])
        alone(end, prompts[0])
    assert end.do(link, clusters) == (OK, [OK, OK])


def test_a_running_pull_makes_the_link_busy_for_unlink_and_probe(tcp_pair: Pair, tmp_path: Path) -> None:
    prompt, decoder = tcp_pair.start(**POOL)
    key, cluster = CacheKey(1, 10), info(1, prompt.port)
    src = prompt.do(kv_make, "kv", desc(), 1, (key,))
    dst = decoder.do(kv_make, "kv", desc(), 2)
    args = (1, "before copy", tmp_path, "pull_cache", key, Use("kv"), 3)
    decoder.do(begin_there, "pull", gated_call_v1, *args)
    gate = Gate(tmp_path)
    try:
        gate.wait()
        for force in (False, True):
            assert decoder.do(unlink, [cluster], 5000, force) == (BUSY, [BUSY])
        with pytest.raises(errors.LinkError) as caught:
            decoder.do(probe, 1)
        assert (caught.value.status_code, caught.value.peer) == (BUSY, 1)
    finally:
        gate.open()
        assert decoder.do(result_there, "pull") is None
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(3, 0)]))
    decoder.do(probe, 1)
    assert decoder.do(unlink, [cluster], 5000, True) == SUCCESS
    alone(prompt, decoder)
    with pytest.raises(NotLinked) as gone:
        decoder.do(probe, 1)
    assert gone.value.status_code is NOT_YET


def test_check_link_status_and_pulls_of_a_stopped_peer_time_out(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.start(**POOL, sync_kv_timeout=200, extra={"llm.PeerTimeout": "600"})
    theirs, mine = both_kinds(prompt, 1), both_kinds(decoder, 3)
    decoder.do(probe, 1)
    with frozen(prompt):
        with pytest.raises(errors.DeadlineExceeded) as caught:
            decoder.do(probe, 1)
        assert (caught.value.status_code, caught.value.phase, caught.value.budget_ms) == (WAITED, "ping", 200)
        for call in PULLS.values():
            refused([decoder], [], errors.DeadlineExceeded, ["200 ms"], kv_call, *call, status=WAITED)
    wait_until(lambda: in_time(decoder, probe, 1))  # once it goes on
    for name, call in PULLS.items():
        wait_until(partial(in_time, decoder, kv_call, *call))
        same_bytes(decoder.do(show, name), moved(mine[name], theirs[name], [(2, 1)]))
    prompt.do(vanish)
    wait_until(lambda: decoder.do(links) == {})
    assert len(decoder.do(redials)) == 1
    assert decoder.do(unlink, [info(1, prompt.port)]) == (OK, [NOT_YET])
    assert decoder.do(redials) == ()


def test_check_link_status_and_link_refuse_what_is_no_cluster_id_and_the_other_mode(end: LocalEnd) -> None:
    start_end(end, "DECODER", 1, **DIRECT)
    refuse([end], Table("dd.check_link_status", {}, {"remote_cluster_id": refusals.UINT64}))
    arguments = ("name", {1: 0, 2: 1}, ranks.table(host(0), host(0)))
    refused([end], [], StateError, ["v1 mode", "link_clusters"], join, *arguments)
    for function in (drop, status):
        refused([end], [], StateError, ["v1 mode"], function, 1)
    end.world.dd.finalize()
    with pytest.raises(NotInitialized):
        end.do(probe, 1)
    end.start("DECODER", 1)
    refused([end], [], StateError, ["v1 mode"], probe, 1)


# --- switch_role ------------------------------------------------------------------------------------------------------
def test_a_link_keeps_the_role_and_after_it_keys_and_pulls_go_by_the_role_of_now(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.start(**POOL, enable_switch_role=True)
    prompt.do(kv_make, "kv", desc(rows=2), 1, (CacheKey(1, 7),))
    exist = LLMStatusCode.LLM_EXIST_LINK
    for end, role in ((prompt, "DECODER"), (decoder, "PROMPT")):
        refused([end], [], StateError, ["unlinked first"], switch, role, LISTENING, status=exist)
    assert decoder.do(unlink, [info(1, prompt.port)]) == SUCCESS
    alone(prompt, decoder)
    assert prompt.do(switch, "DECODER") is None
    port = decoder.do(switch, "PROMPT", LISTENING)
    source = decoder.do(kv_make, "late", desc(rows=1), 3, (CacheKey(2, 9),))
    target = prompt.do(show, "kv")
    assert prompt.do(link, [info(2, port)]) == SUCCESS
    prompt.do(kv_call, "pull_cache", CacheKey(2, 9), Use("kv"), 1)
    same_bytes(prompt.do(show, "kv"), moved(target, source, [(1, 0)]))
    with pytest.raises(ParamError, match="DECODER"):  # the key is still bound
        prompt.do(kv_call, "remove_cache_key", CacheKey(1, 7))
    assert len(prompt.do(picture).keys) == 1
    with pytest.raises(ParamError, match="PROMPT"):
        decoder.do(kv_call, "pull_cache", CacheKey(1, 7), Use("late"), 0)
    assert decoder.do(link, [info(1, 1)])[0] is INVALID


# --- pulls ------------------------------------------------------------------------------------------------------------
def both(pair: Pair, **settings: Any) -> tuple[Bytes, Bytes]:
    """Start, link, and make a cache "kv" at each end, the prompt's with ROW_KEYS on rows 0 and 1."""
    if pair.transport == "shm":
        pair.transport = "auto"  # shm maps pools; what has none, and raw addresses, are reached by cma, beside it
    pair.start(**(POOL | settings))
    return pair.prompt.do(kv_make, "kv", desc(), 1, ROW_KEYS), pair.decoder.do(kv_make, "kv", desc(), 2)


def consumed(pair: Pair, left: int) -> None:
    """Wait until the prompt has so many keys left, and no pin."""
    wait_until(lambda: pair.prompt.do(picture).pins == 0 and len(pair.prompt.do(picture).keys) == left)


def pull(world: World, key: CacheKey, row: int, size: int, keywords: dict[str, Any]) -> None:
    kv_call(world, "pull_cache", key, Use("kv"), row, size, **keywords)


@pytest.mark.parametrize("memory", [POOL, DIRECT], ids=["pool", "direct"])
def test_r12_r26_a_row_consumes_its_key_blocks_do_not_both_go_to_addresses(pair: Pair, memory: dict[str, Any]) -> None:
    src, dst = both(pair, **memory)
    prompt, decoder = pair.prompt, pair.decoder
    decoder.do(kv_call, "pull_cache", ROW_KEYS[1], Use("kv"), 5)
    dst = moved(dst, src, [(5, 1)])
    same_bytes(decoder.do(show, "kv"), dst)
    consumed(pair, 1)
    with pytest.raises(CacheNotFound):
        decoder.do(kv_call, "pull_cache", ROW_KEYS[1], Use("kv"))
    for row in (0, 7):  # by id and row: row 0 carries the other key, row 7 none
        decoder.do(kv_call, "pull_cache", CacheKeyByIdAndIndex(1, 1, row), Use("kv"), row)
    dst = moved(dst, src, [(0, 0), (7, 7)])
    same_bytes(decoder.do(show, "kv"), dst)
    same_bytes(prompt.do(show, "kv"), src)
    consumed(pair, 0)
    theirs = prompt.do(kv_make, "paged", desc(), 3, (), True, BLOCKS)
    mine = decoder.do(kv_make, "paged", desc(rows=6), 4, (), True)
    for _ in range(2):
        decoder.do(kv_call, "pull_blocks", BLOCKS, Use("paged"), (1, 2, 7, 6), np.array([3, 4, 0, 3]))
    of_layers = partial(kv_call, src_layer_range=range(1, 2), dst_layer_range=range(1))
    decoder.do(of_layers, "pull_blocks", BLOCKS, Use("paged"), range(5, 6), [np.int8(5)])
    mine = moved(moved(mine, theirs, [(3, 1), (4, 2), (0, 7), (3, 6)]), theirs, [(5, 5)], [(0, 2), (1, 3)])
    same_bytes(decoder.do(show, "paged"), mine)
    consumed(pair, 1)
    at_row_5 = [address + 5 * 48 for address in decoder.do(addresses, "kv")]
    assert prompt.do(send, "kv", TransferConfig(2, at_row_5, None, 2)) == SUCCESS
    place = TransferConfig(2, decoder.do(addresses, "paged"))
    assert prompt.do(send, "paged", place, [0, 1, 2, 3, 7], [3, 2, 5, 0, 2]) == SUCCESS
    mine = moved(mine, theirs, [(3, 0), (2, 1), (5, 2), (0, 3), (2, 7)])
    for end, rows, blocks in ((decoder, moved(dst, src, [(5, 2)]), mine), (prompt, src, theirs)):
        same_bytes(end.do(show, "kv"), rows)
        same_bytes(end.do(show, "paged"), blocks)


@pytest.mark.parametrize(("transport", "by_id"), [("auto", False), ("tcp", True)])
def test_r05_r12_r28_both_ends_are_0_and_what_is_deallocated_waits(shm_pair: Pair, transport: str, by_id: bool) -> None:
    """As vllm-ascend's first connectors do it, with one cache for each model id."""
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    for end, role in ((prompt, "PROMPT"), (decoder, "DECODER")):
        start_end(end, role, 0, extra={"llm.Transport": transport})
    assert decoder.do(link, [info(0, prompt.port)]) == SUCCESS
    for request in (7, 8):
        for model in (1, 2):
            key, first = CacheKey(0, request, model), request == 7
            source = prompt.do(kv_make, "kv", desc(rows=1), 10 * request + model, (key,))
            prompt.do(kv_call, "deallocate_cache", Use("kv"))
            assert prompt.do(picture).caches.deferred == 1
            decoder.do(kv_make, "kv", desc(rows=1), 5)
            name = CacheKeyByIdAndIndex(0, model, 0) if by_id and first else key
            decoder.do(kv_call, "pull_cache", name, Use("kv"), 0)
            same_bytes(decoder.do(show, "kv"), source)
            with pytest.raises(CacheNotFound):  # it was pulled already
                decoder.do(kv_call, "pull_cache", key, Use("kv"), 0)
            # The tables know it a moment before the pool has its pages back.
            wait_until(lambda: prompt.do(picture).pools[0].used_bytes == 0)
            assert (prompt.do(picture).keys, prompt.do(picture).caches.nbytes) == ((), 0)
    assert decoder.do(unlink, [info(0, prompt.port)]) == SUCCESS


def send(world: World, name: str, config: TransferConfig, *blocks: list[int]) -> Any:
    task = kv_call(world, "transfer_cache_async", Use(name), Always(), [config], *blocks)
    return task.synchronize(20_000), task.get_results()


PULLS: dict[str, tuple[Any, ...]] = {
    "kv": ("pull_cache", CacheKeyByIdAndIndex(1, 1, 1), Use("kv"), 2),
    "paged": ("pull_blocks", BLOCKS, Use("paged"), [1], [2]),
}


def both_kinds(end: End, seed: int) -> dict[str, Bytes]:
    key = BLOCKS if end.cluster_id == 1 else None
    rows = end.do(kv_make, "kv", desc(), seed)
    return {"kv": rows, "paged": end.do(kv_make, "paged", desc(), seed + 1, (), True, key)}


#: Offsets into the rows of source and destination, size, and how many bytes move.
OFFSETS = [(0, 0, 48, 48), (31, 13, 17, 17), (8, 40, -1, 8), (None, 47, -1, 1), (47, None, 1, 1)]


def test_offsets_are_bytes_inside_the_row_of_either_end_and_go_with_layer_ranges(pair: Pair) -> None:
    src, dst = both(pair)
    # Outside of the row, at either end: one wrong argument at a time is in test_v1_caches.py.
    for kind, name, end in (
        (ParamError, "dst_cache_offset", "48 bytes"),
        (errors.CacheMismatch, "src_cache_offset", "48"),
    ):
        outside = {name: 2**64 - 1}
        parts = (f"{name}={2**64 - 1}", end)
        refused((pair.decoder, pair.prompt), ["kv"], kind, parts, pull, ROW_KEYS[0], 0, 1, outside)
    for row, (src_at, dst_at, size, length) in enumerate(OFFSETS):
        offsets = {"src_cache_offset": src_at, "dst_cache_offset": dst_at, "tensor_num_per_layer": 1}
        pair.decoder.do(pull, CacheKeyByIdAndIndex(1, 1, row), 7 - row, size, offsets)
        at, of = dst_at or 0, src_at or 0
        for tensor, source in zip(dst, src, strict=True):
            tensor[7 - row, at : at + length] = source[row, of : of + length]
    same_bytes(pair.decoder.do(show, "kv"), dst)
    consumed(pair, 0)  # interface R5: neither offsets nor size make a pull incomplete

    # Rows of unequal length, and a third of the layers: the key stays until the union covers it.
    src = pair.prompt.do(kv_make, "kv", desc(6, 2, 100), 3, ROW_KEYS)
    dst = pair.decoder.do(kv_make, "kv", desc(4, 3, 40), 4)
    layers = {"src_layer_range": range(1, 2), "dst_layer_range": range(1)}
    pair.decoder.do(pull, ROW_KEYS[1], 2, 30, layers | {"src_cache_offset": 70})
    for to, from_ in ((0, 2), (1, 3)):
        dst[to][2, :30] = src[from_][1, 70:]
    same_bytes(pair.decoder.do(show, "kv"), dst)
    consumed(pair, 2)
    for layer in (0, 2):
        pair.decoder.do(pull, ROW_KEYS[1], 0, 40, layers | {"src_layer_range": range(layer, layer + 1)})
    consumed(pair, 1)


def _pull_until_unlinked(world: World) -> list[str]:
    """Pull again and again until the link is gone; return what the errors said."""
    texts: list[str] = []
    while True:
        try:
            kv_call(world, "pull_blocks", BLOCKS, Use("kv"), [0], [0])
        except NotLinked as error:
            return [*texts, str(error)]
        except LLMException as error:
            texts.append(str(error))


def test_r22_whatever_a_lost_prompt_interrupts_the_error_names_the_call(shm_pair: Pair) -> None:
    """Regression: the error named the message that was being sent, not the call."""
    shm_pair.start(**POOL)
    shm_pair.prompt.do(kv_make, "kv", desc(), 1, (), True, BLOCKS)
    shm_pair.decoder.do(kv_make, "kv", desc(), 2, (), True)
    names = [f"pull {i}" for i in range(4)]
    for name in names:
        shm_pair.decoder.do(begin_there, name, _pull_until_unlinked)
    shm_pair.prompt.stop()
    for name in names:
        *during, after = shm_pair.decoder.do(result_there, name)
        assert [text for text in during if not text.startswith("pull_blocks: ")] == []
        assert "cluster 1" in after


# --- transfers to addresses -------------------------------------------------------------------------------------------
def test_r01_r06_a_task_that_is_not_over_has_v1s_code_and_a_wrong_argument_a_typed_error(local_pair: Pair) -> None:
    prompt, decoder = local_pair.prompt, local_pair.decoder
    src, dst = both(local_pair, **DIRECT)
    addrs = decoder.do(addresses, "kv")
    gated = Gated()
    args = (Use("kv"), gated, [TransferConfig(2, addrs[:2], range(1))])
    task = prompt.do(kv_call, "transfer_cache_async", *args)
    assert (task.synchronize(1), task.get_results(1)) == (WAITED, [WAITED])
    gated.open(0)
    assert (task.synchronize(20_000), task.get_results()) == (OK, [OK])
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(0, 0)], [(0, 0), (1, 1)]))
    wait_until(lambda: decoder.do(picture).pins == 0)  # a release is on its way when a task is over

    config, of_three = TransferConfig(2, addrs), TransferConfig(2, addrs[:3])
    by_key = [TransferWithCacheKeyConfig(key, range(2), range(2)) for key in (CacheKeyByIdAndIndex(2, 1), BLOCKS)]
    good = {"src_cache": Use("kv"), "layer_synchronizer": Always(), "transfer_configs": [config]}
    configs = Spec((config,), (refusals.NONE, "{}[0]", [None]), (TYPE, "{}[0]", *([each] for each in by_key)))
    table = Table(
        "v1.transfer_cache_async",
        good,
        {"src_cache": Spec((1,)), "layer_synchronizer": Spec((1,)), "transfer_configs": configs},
        bad(RULE, "dst_addrs has 3", transfer_configs=[of_three]),
        bad(RULE, "src_block_indices", src_block_indices=[0]),
        bad(RULE, "dst_block_memory_size is None", dst_block_indices=[0]),
        bad(RULE, "equal lengths", src_block_indices=[0, 1], dst_block_indices=[0]),
    )
    refuse((prompt, decoder), table)
    refuse((decoder, prompt), Table(table.call, good, {}, bad(RULE, "only a PROMPT")))
