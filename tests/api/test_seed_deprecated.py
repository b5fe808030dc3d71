"""The ten entries of the page of deprecated names, copy_cache and swap_blocks as flows of two ends (interface §6, §7,
R27).

Each is the flow that the page describes. The printed samples in one process, and CopyKvBlocks: test_seed_pages.py.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, Cache, CacheDesc, CacheKey, DataType, LLMStatusCode, Placement
from llm_datadist._memory.host import host_memory_limit
from llm_datadist.errors import CacheNotFound, KeyInUse, ParamError
from llm_datadist.testing import StagedDevice
from tests.support.memory import pool
from tests.support.moves import Use, call, moved, same_bytes, show, wait_until
from tests.support.world import fill, read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conftest import Pair
    from tests.support.ends import End, LocalEnd
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "CacheManager: allocate_blocks_cache allocate_cache copy_blocks copy_cache deallocate_blocks_cache",
    "CacheManager: deallocate_cache remove_cache_key swap_blocks",
    "LLMConfig: host_mem_pool_cfg mem_pool_cfg",
    "llm: HostMemPoolConfig MemPoolConfig",
)

#: What the page prints for mem_pool_cfg, and the same pages in a pool of 32 MiB.
PAGE_POOL = {"memory_size": 18737418240, "page_shift": 16}
SMALL_POOL = '{"memory_size": 33554432, "page_shift": 16}'
PAGE = 1 << 16
#: The request id of a placeholder, as the page prints it: this row has no key.
NO_KEY = 2**64 - 1
#: The older samples: 4 tensors of 10 blocks.
SAMPLE = CacheDesc(4, [10, 128], DataType.DT_FLOAT16)


# --- what the tests send to an end ------------------------------------------------------------------------------------


def rows(world: World, shape: Sequence[int], requests: Sequence[int], seed: int, name: str = "kv") -> Bytes:
    """Allocate 4 fp16 tensors with a request's key per row, and fill them."""
    desc = CacheDesc(4, list(shape), DataType.DT_FLOAT16)
    world.caches[name] = cache = world.cm.allocate_cache(desc, [CacheKey(1, request) for request in requests])
    return fill(cache, seed)


def blocks(world: World, model: int | None, seed: int) -> Bytes:
    """Allocate a blocks cache, with the key of a model or without, and fill it."""
    key = None if model is None else BlocksCacheKey(1, model)
    world.caches["kv"] = cache = world.cm.allocate_blocks_cache(SAMPLE, key)
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


def copy(world: World, arguments: dict[str, int]) -> Any:
    return call(world, "copy_cache", Use("kv"), Use("src"), **arguments)


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


def test_seed_deprecated_allocate_cache(pair: Pair) -> None:
    pair.start(mem_pool_cfg=SMALL_POOL)
    # Placeholders at rows 1 and 3, none for the last row, and request 7 twice: the last row wins.
    src = pair.prompt.do(rows, [6, 16384 + 8], [7, NO_KEY, 9, NO_KEY, 7], 1)
    assert pair.prompt.do(used) == 4 * 4 * PAGE  # 196704 bytes a tensor: three pages and 96 bytes
    dst = pair.decoder.do(rows, [2, 16384 + 8], [], 2)
    for row, (request, source) in enumerate([(9, 2), (7, 4)]):
        pair.decoder.do(call, "pull_cache", CacheKey(1, request), Use("kv"), row)
        dst = moved(dst, src, [(row, source)])
    same_bytes(pair.decoder.do(show, "kv"), dst)
    same_bytes(pair.prompt.do(show, "kv"), src)
    not_there(pair.decoder, "pull_cache", CacheKey(1, 8), 0)


def test_seed_deprecated_deallocate_cache(pair: Pair) -> None:
    pair.start(mem_pool_cfg=SMALL_POOL)
    src = pair.prompt.do(rows, [2, 4096], [0, 1], 1)
    dst = pair.decoder.do(rows, [2, 4096], [], 2)
    # The handle is empty at once; the memory stays until the last key has been pulled.
    assert pair.prompt.do(give_back, "cache") == []
    for request in (0, 1):
        assert pair.prompt.do(used) == 4 * PAGE
        pair.decoder.do(call, "pull_cache", CacheKey(1, request), Use("kv"), request)
    wait_until(lambda: pair.prompt.do(used) == 0)
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(0, 0), (1, 1)]))
    not_there(pair.decoder, "pull_cache", CacheKey(1, 0), 0)


def test_seed_deprecated_remove_cache_key(pair: Pair) -> None:
    pair.start(mem_pool_cfg=SMALL_POOL)
    src = pair.prompt.do(rows, [2, 4096], [0, 1], 1)
    pair.decoder.do(rows, [1, 4096], [], 2)
    pair.prompt.do(call, "remove_cache_key", CacheKey(1, 0))
    not_there(pair.decoder, "pull_cache", CacheKey(1, 0), 0)
    pair.decoder.do(call, "pull_cache", CacheKey(1, 1), Use("kv"), 0)
    same_bytes(pair.decoder.do(show, "kv"), [tensor[1:] for tensor in src])
    same_bytes(pair.prompt.do(show, "kv"), src)
    # The last key of a cache that was deallocated takes the memory with it; a key that is gone is a no-op.
    pair.prompt.do(rows, [1, 4096], [5], 3, "second")
    pair.prompt.do(give_back, "cache", "second")
    assert pair.prompt.do(used) == 2 * 4 * PAGE
    for _ in range(2):
        pair.prompt.do(call, "remove_cache_key", CacheKey(1, 5))
        assert pair.prompt.do(used) == 4 * PAGE
    not_there(pair.decoder, "pull_cache", CacheKey(1, 5), 0)


def test_seed_deprecated_copy_cache(pair: Pair) -> None:
    pair.start()
    src = pair.prompt.do(rows, [1, 2048], [0], 1)
    landing = pair.decoder.do(rows, [1, 2048], [], 2, "src")
    batch = pair.decoder.do(rows, [4, 2048], [], 3)
    # The decoder pulls a request into a cache of its own and copies it, whole rows by default, into its batch.
    pair.decoder.do(call, "pull_cache", CacheKey(1, 0), Use("src"))
    assert pair.decoder.do(copy, {"dst_batch_index": 2}) is None
    same_bytes(pair.decoder.do(show, "kv"), moved(batch, src, [(2, 0)]))
    same_bytes(pair.decoder.do(show, "src"), moved(landing, src, [(0, 0)]))
    same_bytes(pair.prompt.do(show, "kv"), src)


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
            assert end.do(copy, arguments) is None
        for to, of in zip(dst, src, strict=True):
            to[dst_row, part] = of[src_row, part]
        same_bytes(end.do(show, "kv"), dst)
        same_bytes(end.do(show, "src"), src)
    records = [record.getMessage() for record in caplog.records if record.getMessage().startswith("copy_cache")]
    assert ["req_id=4711" in text for text in records] == [False] * 6 + [True] * 2


# --- caches of blocks -------------------------------------------------------------------------------------------------


def test_seed_deprecated_allocate_blocks_cache(pair: Pair) -> None:
    pair.start(mem_pool_cfg=SMALL_POOL)
    src = pair.prompt.do(blocks, 0, 1)
    assert pair.prompt.do(used) == 4 * PAGE
    with pytest.raises(KeyInUse) as caught:  # one blocks cache per model
        pair.prompt.do(blocks, 0, 2)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert pair.prompt.do(used) == 4 * PAGE
    dst = pair.decoder.do(blocks, None, 3)
    for to in ([2, 3], [9, 0]):  # a blocks key is not consumed
        pair.decoder.do(call, "pull_blocks", BlocksCacheKey(1, 0), Use("kv"), [0, 1], to)
        dst = moved(dst, src, zip(to, [0, 1], strict=True))
    same_bytes(pair.decoder.do(show, "kv"), dst)
    same_bytes(pair.prompt.do(show, "kv"), src)


def test_seed_deprecated_deallocate_blocks_cache(pair: Pair) -> None:
    pair.start(mem_pool_cfg=SMALL_POOL)
    pair.prompt.do(blocks, 0, 1)
    dst = pair.decoder.do(blocks, None, 2)
    # Memory and key go at once, although nobody has pulled; the key is free for the next cache.
    assert pair.prompt.do(give_back, "blocks_cache") == []
    assert pair.prompt.do(used) == 0
    not_there(pair.decoder, "pull_blocks", BlocksCacheKey(1, 0), [0], [0])
    src = pair.prompt.do(blocks, 0, 3)
    pair.decoder.do(call, "pull_blocks", BlocksCacheKey(1, 0), Use("kv"), [4], [5])
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(5, 4)]))
    same_bytes(pair.prompt.do(show, "kv"), src)


def test_seed_deprecated_copy_blocks(pair: Pair) -> None:
    pair.start()
    src = pair.prompt.do(blocks, 0, 1)
    dst = pair.decoder.do(blocks, None, 2)
    pair.decoder.do(call, "pull_blocks", BlocksCacheKey(1, 0), Use("kv"), [0, 1], [2, 3])
    pair.decoder.do(call, "copy_blocks", Use("kv"), {2: [0, 1], 3: [9]})
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(2, 0), (3, 1), (0, 0), (1, 0), (9, 1)]))
    same_bytes(pair.prompt.do(show, "kv"), src)


def test_seed_deprecated_swap_blocks(pair: Pair) -> None:
    pair.start()
    src = pair.prompt.do(blocks, 0, 1)
    dst = pair.decoder.do(blocks, None, 2)
    host = pair.decoder.do(cpu, 3)
    # Pulled, swapped out, pulled over, swapped in again.
    pair.decoder.do(call, "pull_blocks", BlocksCacheKey(1, 0), Use("kv"), [0, 1], [0, 1])
    pair.decoder.do(call, "swap_blocks", Use("kv"), Use("host"), {0: 0, 1: 1})
    pair.decoder.do(call, "pull_blocks", BlocksCacheKey(1, 0), Use("kv"), [8, 9], [0, 1])
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(0, 8), (1, 9)]))
    pair.decoder.do(call, "swap_blocks", Use("host"), Use("kv"), {0: 0, 1: 1})
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(0, 0), (1, 1)]))
    same_bytes(pair.decoder.do(show, "host"), moved(host, src, [(0, 0), (1, 1)]))
    same_bytes(pair.prompt.do(show, "kv"), src)


def test_seed_swap_blocks_page(end: LocalEnd) -> None:
    device = StagedDevice()
    end.start("DECODER", 2, device=device)
    near, far = end.do(blocks, None, 1), end.do(cpu, 2)
    # Out to host memory, the blocks go to somebody else, and in again elsewhere.
    end.do(call, "swap_blocks", Use("kv"), Use("host"), {2: 0, 5: 1, 6: 2})
    far = moved(far, near, [(0, 2), (1, 5), (2, 6)])
    same_bytes(end.do(show, "host"), far)
    same_bytes(end.do(show, "kv"), near)
    near = fill(end.world.caches["kv"], 3)
    end.do(call, "swap_blocks", Use("host"), Use("kv"), {0: 9, 1: 8, 2: 0})
    same_bytes(end.do(show, "kv"), moved(near, far, [(9, 0), (8, 1), (0, 2)]))
    same_bytes(end.do(show, "host"), far)
    # In: through four buffers of a block's size, which one thread empties. Out: by the swap workers.
    assert end.world.dd.statistics().swap.staging_bytes == 4 * (SAMPLE.size // SAMPLE.batch_size)
    assert len(device.count("on_device").threads) == 1
    workers = device.count("from_device").threads
    assert workers
    assert all(name.startswith("llm-datadist-swap") for name in workers)


# --- pools ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    host_memory_limit()[0] < PAGE_POOL["memory_size"],
    reason="the page's pool of 18737418240 bytes needs a host with as much memory; interface R11 refuses it elsewhere",
)
def test_seed_deprecated_mem_pool_cfg(end: LocalEnd) -> None:
    before = resident_shared_bytes()
    end.start("PROMPT", 1, mem_pool_cfg=json.dumps(PAGE_POOL), host_mem_pool_cfg=None)
    (device,) = end.world.dd.statistics().pools
    assert (device.name, device.page_bytes) == ("device", PAGE)
    assert device.capacity_bytes == PAGE_POOL["memory_size"] // PAGE * PAGE
    src = end.do(rows, [2, 16384 + 1], [0], 1)  # 65540 bytes a tensor: one page and four bytes
    assert end.do(used) == 4 * 2 * PAGE
    same_bytes(end.do(show, "kv"), src)
    # The 18 GiB are reserved, not touched: what is resident is the cache and a few pages of tables.
    assert 4 * 65540 <= resident_shared_bytes() - before < 16 << 20
    assert end.do(give_back, "cache") == []
    end.do(call, "remove_cache_key", CacheKey(1, 0))
    assert end.do(used) == 0
    end.world.caches.clear()
    end.world.dd.finalize()
    assert resident_shared_bytes() - before < 1 << 20


def test_seed_deprecated_host_mem_pool_cfg(end: LocalEnd) -> None:
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
