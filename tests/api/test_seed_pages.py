"""The printed examples of the interface's pages, with the values that they print, as flows of one or two ends
(interface §6, §7, §14, B11, R14, R27, R31)."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMStatusCode,
    Placement,
)
from llm_datadist._memory.host import host_memory_limit
from llm_datadist.errors import CacheNotFound, KeyInUse, OutOfMemory, ParamError
from llm_datadist.views import tensor_views
from tests.support.memory import pool, refused
from tests.support.moves import Use, call, moved, picture, same_bytes, show, wait_until
from tests.support.world import fill, make_config, read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conftest import Pair
    from tests.support.ends import End, LocalEnd
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "CacheManager: allocate_blocks_cache allocate_cache copy_blocks copy_cache deallocate_blocks_cache",
    "CacheManager: deallocate_cache push_blocks remove_cache_key swap_blocks",
    "LLMConfig: host_mem_pool_cfg mem_pool_cfg",
    "LLMStatusCode: LLM_KV_CACHE_NOT_EXIST LLM_NOT_YET_LINK",
    "llm: HostMemPoolConfig MemPoolConfig",
)

#: What the page prints for mem_pool_cfg, and the same pages in a pool of 32 MiB.
PAGE_POOL = {"memory_size": 18737418240, "page_shift": 16}
SMALL_POOL = '{"memory_size": 33554432, "page_shift": 16}'
PAGE = 1 << 16
#: The request id of a placeholder, as the page prints it: this row has no key.
NO_KEY = 2**64 - 1
#: The older samples: 4 tensors of 10 blocks; those of C++: 4 tensors of 8 blocks.
SAMPLE = CacheDesc(4, [10, 128], DataType.DT_FLOAT16)
CPP_SAMPLE = CacheDesc(4, [8, 16], DataType.DT_INT32)


# --- what the tests send to an end ------------------------------------------------------------------------------------


def rows(world: World, shape: Sequence[int], requests: Sequence[int], seed: int, name: str = "kv") -> Bytes:
    """Allocate 4 fp16 tensors with a request's key per row, and fill them."""
    desc = CacheDesc(4, list(shape), DataType.DT_FLOAT16)
    world.caches[name] = cache = world.cm.allocate_cache(desc, [CacheKey(1, request) for request in requests])
    return fill(cache, seed)


def blocks(world: World, model: int | None, seed: int, desc: CacheDesc = SAMPLE) -> Bytes:
    """Allocate a blocks cache, with the key of a model or without, and fill it."""
    key = None if model is None else BlocksCacheKey(1, model)
    world.caches["kv"] = cache = world.cm.allocate_blocks_cache(desc, key)
    return fill(cache, seed)


def cpu(world: World, seed: int) -> Bytes:
    """Make the CPU cache "host" over NumPy memory, and fill it."""
    world.memory["host"] = [np.zeros(SAMPLE.size, np.uint8) for _ in range(SAMPLE.num_tensors)]
    desc = CacheDesc(SAMPLE.num_tensors, list(SAMPLE.shape), SAMPLE.data_type, Placement.HOST)
    world.caches["host"] = cache = Cache.create_cpu_cache(desc, [each.ctypes.data for each in world.memory["host"]])
    return fill(cache, seed)


def used(world: World) -> int:
    """Bytes taken of the device pool; the tables are checked on the way."""
    world.dd.check_integrity()
    count: int = pool(world).used_bytes
    return count


def give_back(world: World, kind: str, name: str = "kv") -> list[int]:
    """Deallocate twice: the second time is a no-op. Return what is left in the handle."""
    for _ in range(2):
        getattr(world.cm, f"deallocate_{kind}")(world.caches[name])
    return world.caches[name].tensor_addrs


def not_there(end: End, method: str, key: CacheKey | BlocksCacheKey, *args: Any) -> None:
    """A pull by that key finds nothing, and leaves every byte of "kv" alone."""
    before = end.do(show, "kv")
    with pytest.raises(CacheNotFound) as caught:
        end.do(call, method, key, Use("kv"), *args)
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    same_bytes(end.do(show, "kv"), before)


def resident_shared_bytes() -> int:
    """Bytes of shared memory that this process has touched."""
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssShmem"].split()[0]) * 1024


# --- caches of rows ---------------------------------------------------------------------------------------------------


def test_seed_rows_are_allocated_with_keys_pulled_deallocated_and_their_keys_removed(tcp_pair: Pair) -> None:
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    tcp_pair.start(mem_pool_cfg=SMALL_POOL)
    # Placeholders at rows 1 and 3, none for the last row, and request 7 twice: the last row wins.
    src = prompt.do(rows, [6, 16384 + 8], [7, NO_KEY, 9, NO_KEY, 7], 1)
    assert prompt.do(used) == 4 * 4 * PAGE  # 196704 bytes a tensor: three pages and 96 bytes
    dst = decoder.do(rows, [2, 16384 + 8], [], 2)
    for row, (request, source) in enumerate([(9, 2), (7, 4)]):
        decoder.do(call, "pull_cache", CacheKey(1, request), Use("kv"), row)
        dst = moved(dst, src, [(row, source)])
        not_there(decoder, "pull_cache", CacheKey(1, request), 0)
    not_there(decoder, "pull_cache", CacheKey(1, 8), 0)
    same_bytes(decoder.do(show, "kv"), dst)
    same_bytes(prompt.do(show, "kv"), src)
    assert prompt.do(give_back, "cache") == []
    wait_until(lambda: prompt.do(used) == 0)

    # The handle is empty at once; the memory stays until the last key has been pulled, or removed.
    src = prompt.do(rows, [3, 16384 + 8], [0, 1, 5], 3)
    assert prompt.do(give_back, "cache") == []
    prompt.do(call, "remove_cache_key", CacheKey(1, 0))
    not_there(decoder, "pull_cache", CacheKey(1, 0), 0)
    decoder.do(call, "pull_cache", CacheKey(1, 1), Use("kv"), 0)
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(0, 1)]))
    wait_until(lambda: len(prompt.do(picture).keys) == 1)
    assert prompt.do(used) == 4 * 2 * PAGE
    for _ in range(2):  # a key that is gone is a no-op
        prompt.do(call, "remove_cache_key", CacheKey(1, 5))
        assert prompt.do(used) == 0
    not_there(decoder, "pull_cache", CacheKey(1, 5), 0)


def test_seed_copy_cache_page(end: LocalEnd, caplog: pytest.LogCaptureFixture) -> None:
    end.start("DECODER", 2)
    src = end.do(rows, [2, 1024], [], 1, "src")
    dst = end.do(rows, [4, 1024], [], 2)
    copies: list[tuple[dict[str, int], int, int, slice]] = [
        ({}, 0, 0, slice(0, 2048)),
        ({"dst_batch_index": 3, "src_batch_index": 1}, 3, 1, slice(0, 2048)),
        ({"dst_batch_index": 1, "offset": 128}, 1, 0, slice(128, 2048)),
        ({"dst_batch_index": 2, "src_batch_index": 1, "offset": 5, "size": 7, "req_id": 4711}, 2, 1, slice(5, 12)),
    ]
    for arguments, dst_row, src_row, part in copies:
        with caplog.at_level(logging.INFO, "LLM_DATADIST"):
            assert call(end.world, "copy_cache", Use("kv"), Use("src"), **arguments) is None
        for to, of in zip(dst, src, strict=True):
            to[dst_row, part] = of[src_row, part]
        same_bytes(end.do(show, "kv"), dst)
        same_bytes(end.do(show, "src"), src)
    records = [record.getMessage() for record in caplog.records if record.getMessage().startswith("copy_cache")]
    assert ["req_id=4711" in text for text in records] == [False] * 6 + [True] * 2


# --- caches of blocks -------------------------------------------------------------------------------------------------


def test_seed_blocks_are_allocated_pulled_copied_swapped_and_deallocated(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    shm_pair.start(mem_pool_cfg=SMALL_POOL)
    key = BlocksCacheKey(1, 0)
    src = prompt.do(blocks, 0, 1)
    assert prompt.do(used) == 4 * PAGE
    with pytest.raises(KeyInUse) as caught:  # one blocks cache per model
        prompt.do(blocks, 0, 2)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert prompt.do(used) == 4 * PAGE
    dst = decoder.do(blocks, None, 3)
    host = decoder.do(cpu, 4)
    for to in ([2, 3], [9, 0]):  # a blocks key is not consumed
        decoder.do(call, "pull_blocks", key, Use("kv"), [0, 1], to)
        dst = moved(dst, src, zip(to, [0, 1], strict=True))
    decoder.do(call, "copy_blocks", Use("kv"), {2: [0, 1], 3: [8]})
    dst = moved(dst, src, [(0, 0), (1, 0), (8, 1)])
    same_bytes(decoder.do(show, "kv"), dst)
    # Swapped out, pulled over, swapped in again.
    decoder.do(call, "swap_blocks", Use("kv"), Use("host"), {2: 0, 3: 1})
    decoder.do(call, "pull_blocks", key, Use("kv"), [8, 9], [2, 3])
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(2, 8), (3, 9)]))
    decoder.do(call, "swap_blocks", Use("host"), Use("kv"), {0: 2, 1: 3})
    same_bytes(decoder.do(show, "kv"), dst)
    same_bytes(decoder.do(show, "host"), moved(host, src, [(0, 0), (1, 1)]))
    same_bytes(prompt.do(show, "kv"), src)

    # Memory and key go at once, although a peer may still want to pull; the key is free for the next cache.
    assert prompt.do(give_back, "blocks_cache") == []
    assert prompt.do(used) == 0
    not_there(decoder, "pull_blocks", key, [0], [0])
    src = prompt.do(blocks, 0, 5)
    decoder.do(call, "pull_blocks", key, Use("kv"), [4], [5])
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(5, 4)]))
    same_bytes(prompt.do(show, "kv"), src)


#: Layers of the source and of the destination, tensors per layer, and (dst, src) tensors that move.
LAYERS: list[tuple[range | None, range | None, int, list[tuple[int, int]]]] = [
    (range(1), range(1), 1, [(0, 0)]),
    (range(1), range(1), 2, [(0, 0), (1, 1)]),
    (range(3, 4), range(3, 4), 1, [(3, 3)]),
    (range(2), range(2, 4), 1, [(2, 0), (3, 1)]),
    (None, None, 9, [(t, t) for t in range(4)]),
]


def test_seed_r14_r31_copy_and_push_kv_blocks_through_the_calls_of_v2(tcp_pair: Pair) -> None:
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    tcp_pair.start(rca=True)
    index = CacheKeyByIdAndIndex(1, 1)  # CacheIndex{cluster 1, cache 1, batch 0} of the C++ interface
    src, dst = decoder.do(blocks, None, 1, CPP_SAMPLE), prompt.do(blocks, 0, 2, CPP_SAMPLE)
    # One list to several; block 1 is in both: the later one wins.
    decoder.do(call, "copy_blocks", Use("kv"), {5: [0, 4], 6: [1, 3], 7: [2, 1]})
    src = moved(src, src, [(0, 5), (4, 5), (1, 6), (3, 6), (2, 7), (1, 7)])
    decoder.do(call, "push_blocks", index, Use("kv"), [1, 2], [3, 4])
    decoder.do(call, "push_blocks", BlocksCacheKey(1, 0), Use("kv"), [3], [5])  # both ways of addressing are one cache
    dst = moved(dst, src, [(3, 1), (4, 2), (5, 3)])
    same_bytes(prompt.do(show, "kv"), dst)
    for at, (here, there, per_layer, tensors) in enumerate(LAYERS):
        decoder.do(call, "push_blocks", index, Use("kv"), [at, 7], [6, 7 - at], here, there, per_layer)
        dst = moved(dst, src, [(6, at), (7 - at, 7)], tensors)
        same_bytes(prompt.do(show, "kv"), dst)
    same_bytes(decoder.do(show, "kv"), src)


# --- pools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mem_pool_cfg", "host_mem_pool_cfg"])
def test_seed_pool_of_18737418240_bytes(end: LocalEnd, name: str) -> None:
    size = PAGE_POOL["memory_size"]
    settings: dict[str, Any] = {"mem_pool_cfg": None, "host_mem_pool_cfg": None} | {name: json.dumps(PAGE_POOL)}
    most, source = host_memory_limit()
    if most < size:  # the other half of interface R11: this host is too small for the example, and is told so
        with pytest.raises(OutOfMemory, match=f"{size} bytes, larger than the {most} bytes of {source}"):
            end.start("PROMPT", 1, **settings)
        return
    placement = Placement.DEVICE if name == "mem_pool_cfg" else Placement.HOST
    before = resident_shared_bytes()
    end.start("PROMPT", 1, **settings)
    (figures,) = end.world.dd.statistics().pools
    assert (figures.name, figures.page_bytes) == (placement.name.lower(), PAGE)
    assert figures.capacity_bytes == size // PAGE * PAGE
    # Most of it, at once; the pages are reserved, not touched: a byte at either end is all that it costs.
    cache = end.world.cm.allocate_cache(CacheDesc(1, [17, 2**30], DataType.DT_INT8, placement), [CacheKey(1, 1)])
    (view,) = tensor_views(cache)
    view[0, 0] = view[16, -1] = 1
    assert (view[0, 0], view[8, 5], view[16, -1]) == (1, 0, 1)
    assert pool(end.world, figures.name).used_bytes == 17 * 2**30
    assert resident_shared_bytes() - before < 16 << 20
    with refused(end.world, OutOfMemory, "18737397760", status=LLMStatusCode.LLM_OUT_OF_MEMORY):
        end.world.cm.allocate_cache(CacheDesc(1, [1, 2**31], DataType.DT_INT8, placement))
    end.world.cm.deallocate_cache(cache)
    end.world.cm.remove_cache_key(CacheKey(1, 1))
    assert pool(end.world, figures.name).used_bytes == 0
    del view
    end.world.dd.finalize()
    assert resident_shared_bytes() - before < 1 << 20
    end.world.dd.init(make_config(**settings))


def test_seed_host_mem_pool_cfg(end: LocalEnd) -> None:
    with pytest.raises(ParamError, match=str((20 << 30) + 1)) as caught:
        end.start("PROMPT", 1, host_mem_pool_cfg=json.dumps({"memory_size": (20 << 30) + 1}))
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert "memory_size" in str(caught.value)
    # Two pools, independent of each other: the placement says which one serves a cache.
    end.start("PROMPT", 1, mem_pool_cfg=SMALL_POOL, host_mem_pool_cfg='{"memory_size": 1048576, "page_shift": 12}')
    cm, caches, contents = end.world.cm, end.world.caches, {}
    for seed, placement in enumerate((Placement.HOST, Placement.DEVICE)):
        desc = CacheDesc(2, [3, 1400], DataType.DT_FLOAT16, placement)  # 8400 bytes: three pages of 4 KiB
        caches[placement.name] = cm.allocate_cache(desc)
        contents[placement.name] = fill(caches[placement.name], seed)
    assert (pool(end.world, "host").used_bytes, pool(end.world, "host").page_bytes) == (2 * 3 * 4096, 4096)
    assert (pool(end.world).used_bytes, pool(end.world).page_bytes) == (2 * PAGE, PAGE)
    cm.copy_cache(caches["HOST"], caches["DEVICE"], 1, 2)
    same_bytes(read(caches["HOST"]), moved(contents["HOST"], contents["DEVICE"], [(1, 2)]))
    same_bytes(read(caches["DEVICE"]), contents["DEVICE"])
    cm.deallocate_cache(caches.pop("HOST"))
    assert pool(end.world, "host").used_bytes == 0
    assert pool(end.world).used_bytes == 2 * PAGE
