"""The seed pages, entry by entry, with the values that they and the samples print (interface §14, B11)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMStatusCode, Placement
from llm_datadist._memory.host import host_memory_limit
from llm_datadist.errors import CacheNotFound, OutOfMemory, ParamError
from llm_datadist.views import tensor_views
from tests.support.memory import cpu_cache, equal, pool, refused, settled
from tests.support.world import World, fill, make_config, read

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tests.conftest import Pair
    from tests.support.ends import LocalEnd

    Bytes = list[NDArray[np.uint8]]

pytestmark = pytest.mark.covers(
    "CacheManager: allocate_blocks_cache allocate_cache copy_blocks copy_cache deallocate_blocks_cache",
    "CacheManager: deallocate_cache remove_cache_key swap_blocks",
    "LLMConfig.mem_pool_cfg",
)

POOL_64_MIB = json.dumps({"memory_size": 64 * 1024 * 1024})
PAGE_EXAMPLE = json.dumps({"memory_size": 18737418240, "page_shift": 16})
KEYS = [CacheKey(1, 0), CacheKey(1, 1)]


def rows_desc() -> CacheDesc:
    """pull_cache_sample: 4 tensors of float16 [2, 16384]."""
    return CacheDesc(4, [2, 16384], DataType.DT_FLOAT16)


def blocks_desc(placement: Placement = Placement.DEVICE) -> CacheDesc:
    """The older samples: 4 tensors of [10, 128]."""
    return CacheDesc(4, [10, 128], DataType.DT_FLOAT16, placement)


# --- at the ends of a pair --------------------------------------------------------------------------------------------


def allocate(world: World, keys: list[CacheKey], seed: int) -> Bytes:
    world.caches["kv"] = world.cm.allocate_cache(rows_desc(), keys)
    return fill(world.caches["kv"], seed)


def allocate_blocks(world: World, key: BlocksCacheKey | None, seed: int) -> Bytes:
    world.caches["kv"] = world.cm.allocate_blocks_cache(blocks_desc(), key)
    return fill(world.caches["kv"], seed)


def deallocate(world: World) -> list[int]:
    cache = world.caches.pop("kv")
    call = world.cm.deallocate_blocks_cache if cache.is_blocks_cache else world.cm.deallocate_cache
    call(cache)
    return cache.tensor_addrs


def remove_key(world: World, key: CacheKey) -> None:
    world.cm.remove_cache_key(key)


def content(world: World) -> Bytes:
    return read(world.caches["kv"])


def in_use(world: World, nbytes: int, keys: int) -> tuple[int, int]:
    """Bytes of the device pool in use, and keys bound: as expected, once the peer's releases have arrived."""
    return settled(lambda: (pool(world).used_bytes, len(world.dd.statistics().keys)), (nbytes, keys))


def pull_cache(world: World, key: CacheKey, row: int) -> Bytes:
    world.cm.pull_cache(key, world.caches["kv"], row)
    return read(world.caches["kv"])


def pull_blocks(world: World, key: BlocksCacheKey, src: list[int], dst: list[int]) -> Bytes:
    world.cm.pull_blocks(key, world.caches["kv"], src, dst)
    return read(world.caches["kv"])


def not_exist(world: World, key: CacheKey | BlocksCacheKey) -> LLMStatusCode:
    """The status of a pull that finds nothing; not a byte has changed."""
    before = read(world.caches["kv"])
    with pytest.raises(CacheNotFound) as caught:
        _ = pull_blocks(world, key, [0], [0]) if isinstance(key, BlocksCacheKey) else pull_cache(world, key, 0)
    equal(read(world.caches["kv"]), before)
    return caught.value.status_code


NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_seed_allocate_cache(pair: Pair) -> None:
    pair.start(mem_pool_cfg=POOL_64_MIB)
    source = pair.prompt.do(allocate, KEYS, 1)
    expected = pair.decoder.do(allocate, [], 2)
    for row, key in enumerate(KEYS):
        for tensor, from_tensor in zip(expected, source, strict=True):
            tensor[row] = from_tensor[row]
        equal(pair.decoder.do(pull_cache, key, row), expected)
    equal(expected, source)
    equal(pair.prompt.do(content), source)
    assert pair.prompt.do(in_use, 4 * 65536, 0) == (4 * 65536, 0)  # 2 x 32768 bytes a tensor: one page of 64 KiB each
    assert [pair.decoder.do(not_exist, key) for key in KEYS] == [NOT_EXIST, NOT_EXIST]


def test_seed_allocate_cache_with_a_placeholder_at_an_unused_row(pair: Pair) -> None:
    pair.start(mem_pool_cfg=POOL_64_MIB)
    source = pair.prompt.do(allocate, [CacheKey(1, req_id=2**64 - 1), CacheKey(1, 7)], 1)
    expected = pair.decoder.do(allocate, [], 2)
    for tensor, from_tensor in zip(expected, source, strict=True):
        tensor[0] = from_tensor[1]
    equal(pair.decoder.do(pull_cache, CacheKey(1, 7), 0), expected)


def test_seed_deallocate_cache_keeps_the_memory_until_the_keys_are_pulled(pair: Pair) -> None:
    pair.start(mem_pool_cfg=POOL_64_MIB)
    source = pair.prompt.do(allocate, KEYS, 1)
    assert pair.prompt.do(deallocate) == []
    assert pair.prompt.do(in_use, 4 * 65536, 2) == (4 * 65536, 2)
    expected = pair.decoder.do(allocate, [], 2)
    for row, key in enumerate(KEYS):
        for tensor, from_tensor in zip(expected, source, strict=True):
            tensor[1 - row] = from_tensor[row]
        equal(pair.decoder.do(pull_cache, key, 1 - row), expected)
        assert pair.decoder.do(not_exist, key) is NOT_EXIST
    assert pair.prompt.do(in_use, 0, 0) == (0, 0)


def test_seed_remove_cache_key(pair: Pair) -> None:
    pair.start(mem_pool_cfg=POOL_64_MIB)
    pair.prompt.do(allocate, KEYS, 1)
    pair.decoder.do(allocate, [], 2)
    pair.prompt.do(remove_key, KEYS[0])
    pair.prompt.do(remove_key, KEYS[0])
    assert pair.decoder.do(not_exist, KEYS[0]) is NOT_EXIST
    pair.decoder.do(pull_cache, KEYS[1], 0)
    pair.prompt.do(remove_key, KEYS[1])
    pair.prompt.do(deallocate)
    assert pair.prompt.do(in_use, 0, 0) == (0, 0)


def test_seed_allocate_blocks_cache(pair: Pair) -> None:
    pair.start(mem_pool_cfg=POOL_64_MIB)
    source = pair.prompt.do(allocate_blocks, BlocksCacheKey(1, 0), 1)
    expected = pair.decoder.do(allocate_blocks, None, 2)
    for _ in range(2):  # a blocks key is never consumed
        for tensor, from_tensor in zip(expected, source, strict=True):
            tensor[[2, 3]] = from_tensor[[0, 1]]
        equal(pair.decoder.do(pull_blocks, BlocksCacheKey(1, 0), [0, 1], [2, 3]), expected)
    equal(pair.prompt.do(content), source)


def test_seed_deallocate_blocks_cache(pair: Pair) -> None:
    pair.start(mem_pool_cfg=POOL_64_MIB)
    pair.prompt.do(allocate_blocks, BlocksCacheKey(1, 0), 1)
    pair.decoder.do(allocate_blocks, None, 2)
    pair.decoder.do(pull_blocks, BlocksCacheKey(1, 0), [0, 1], [2, 3])
    assert pair.prompt.do(in_use, 4 * 65536, 1) == (4 * 65536, 1)
    assert pair.prompt.do(deallocate) == []
    assert pair.prompt.do(in_use, 0, 0) == (0, 0)
    assert pair.decoder.do(not_exist, BlocksCacheKey(1, 0)) is NOT_EXIST


# --- inside one process -----------------------------------------------------------------------------------------------


@pytest.fixture
def world(end: LocalEnd) -> World:
    """An end with a pool of 64 MiB."""
    end.start("DECODER", 1, mem_pool_cfg=POOL_64_MIB)
    return end.world


def test_seed_copy_cache(world: World) -> None:
    src, dst = world.cm.allocate_cache(rows_desc()), world.cm.allocate_cache(rows_desc())
    source, expected = fill(src, 1), fill(dst, 2)
    world.cm.copy_cache(dst, src, 1, 0, req_id=0)
    for tensor, from_tensor in zip(expected, source, strict=True):
        tensor[1] = from_tensor[0]
    equal(read(dst), expected)
    equal(read(src), source)


def test_seed_copy_blocks(world: World) -> None:
    cache = world.cm.allocate_blocks_cache(blocks_desc(), BlocksCacheKey(1, 0))
    expected = fill(cache, 1)
    world.cm.copy_blocks(cache, {2: [0, 1]})
    for tensor in expected:
        tensor[[0, 1]] = tensor[2]
    equal(read(cache), expected)


def test_seed_swap_blocks(world: World) -> None:
    device = world.cm.allocate_blocks_cache(blocks_desc(), BlocksCacheKey(1, 0))
    cpu = cpu_cache(world, "cpu", blocks_desc(Placement.HOST))
    there, away = fill(device, 1), fill(cpu, 2)
    world.cm.swap_blocks(device, cpu, {0: 0, 1: 1})
    for tensor, from_tensor in zip(away, there, strict=True):
        tensor[[0, 1]] = from_tensor[[0, 1]]
    equal(read(cpu), away)
    equal(read(device), there)
    for view in tensor_views(device):
        view[[0, 1]] = 0
    world.cm.swap_blocks(cpu, device, {0: 0, 1: 1})
    equal(read(device), there)
    equal(read(cpu), away)


@pytest.mark.parametrize("name", ["mem_pool_cfg", "host_mem_pool_cfg"])
def test_seed_pool_of_18737418240_bytes(end: LocalEnd, name: str) -> None:
    """The test for mem_pool_cfg and host_mem_pool_cfg, with the value that their page prints."""
    other = {"mem_pool_cfg": None, "host_mem_pool_cfg": None} | {name: PAGE_EXAMPLE}
    most, source = host_memory_limit()
    if most < 18737418240:  # the other half of interface R11: this host is too small for the example, and is told so
        with pytest.raises(OutOfMemory, match=f"18737418240 bytes, larger than the {most} bytes of {source}"):
            end.start("PROMPT", 1, **other)
        return
    placement = Placement.DEVICE if name == "mem_pool_cfg" else Placement.HOST
    end.start("PROMPT", 1, **other)
    (figures,) = end.world.dd.statistics().pools
    assert (figures.page_bytes, figures.capacity_bytes) == (65536, 18737418240 // 65536 * 65536)
    # Most of it, at once; pages are only taken when they are used, so a byte at either end is all that it costs.
    cache = end.world.cm.allocate_cache(CacheDesc(1, [17, 2**30], DataType.DT_INT8, placement), [CacheKey(1, 1)])
    (view,) = tensor_views(cache)
    view[0, 0] = view[16, -1] = 1
    assert (view[0, 0], view[8, 5], view[16, -1]) == (1, 0, 1)
    assert pool(end.world, placement.name.lower()).used_bytes == 17 * 2**30
    with refused(end.world, OutOfMemory, "18737397760", status=LLMStatusCode.LLM_OUT_OF_MEMORY):
        end.world.cm.allocate_cache(CacheDesc(1, [1, 2**31], DataType.DT_INT8, placement))
    end.world.cm.deallocate_cache(cache)
    del view
    end.world.dd.finalize()
    end.world.dd.init(make_config(**other))


# --- CopyKvBlocks through the v2 calls --------------------------------------------------------------------------------


def int32_desc(placement: Placement, **change: Any) -> CacheDesc:
    """The C++ samples: 4 tensors of int32 [8, 16]."""
    values: dict[str, Any] = {"num_tensors": 4, "shape": [8, 16], "data_type": DataType.DT_INT32} | change
    return CacheDesc(**values, placement=placement)


def test_seed_copy_kv_blocks_device_to_device_one_list_to_several(world: World) -> None:
    cache = world.cm.allocate_blocks_cache(int32_desc(Placement.DEVICE))
    expected = fill(cache, 1)
    sources, destinations = [5, 6, 7], [[0, 1, 2], [4, 3, 1]]  # block 1 is in both: the later list wins
    world.cm.copy_blocks(cache, {src: [each[i] for each in destinations] for i, src in enumerate(sources)})
    for targets in destinations:
        for tensor in expected:
            tensor[targets] = tensor[sources]
    equal(read(cache), expected)


@pytest.mark.parametrize("to", ["host", "device"])
def test_seed_copy_kv_blocks_between_device_and_host_one_list_to_several(world: World, to: str) -> None:
    device = world.cm.allocate_blocks_cache(int32_desc(Placement.DEVICE))
    host = cpu_cache(world, "host", int32_desc(Placement.HOST))
    src, dst = (device, host) if to == "host" else (host, device)
    source, expected = fill(src, 1), fill(dst, 2)
    for targets in ([0, 1, 2], [7, 6, 5]):
        world.cm.swap_blocks(src, dst, dict(zip([5, 6, 7], targets, strict=True)))
        for tensor, from_tensor in zip(expected, source, strict=True):
            tensor[targets] = from_tensor[[5, 6, 7]]
    equal(read(dst), expected)
    equal(read(src), source)


def test_seed_copy_kv_blocks_refusals(world: World) -> None:
    device = world.caches["device"] = world.cm.allocate_blocks_cache(int32_desc(Placement.DEVICE))
    host, other = (cpu_cache(world, name, int32_desc(Placement.HOST)) for name in ("host", "other"))
    small = cpu_cache(world, "small", int32_desc(Placement.HOST, shape=[8, 8]))
    few = cpu_cache(world, "few", int32_desc(Placement.HOST, num_tensors=3))
    for src, dst, text in (
        (host, other, "both on HOST"),
        (device, small, "block sizes differ"),
        (few, device, "num_tensors differ"),
    ):
        with refused(world, ParamError, text):
            world.cm.swap_blocks(src, dst, {0: 0})
    with refused(world, ParamError, "8"):
        world.cm.swap_blocks(device, host, {0: 0, 8: 1})
    with refused(world, ParamError, "8"):
        world.cm.copy_blocks(device, {5: [0, 8]})
