"""Registered memory outside every pool, between two processes: by cma beside shm (auto), and by cma alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType
from llm_datadist._memory.segment import ExternalSegment
from llm_datadist.errors import CacheNotFound, LLMStatusCode
from tests.conftest import Pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from llm_datadist.metrics import LinkStatistics
    from tests.support.ends import ChildEnd
    from tests.support.world import World

pytestmark = pytest.mark.covers("LLMDataDist.explain")

TENSORS, BLOCKS, BLOCK = 4, 12, 4096 + 64
KEY = BlocksCacheKey(1, 3)
Bytes = list["NDArray[np.uint8]"]


@pytest.fixture(params=["auto", "cma"])
def apart(request: pytest.FixtureRequest, children: tuple[ChildEnd, ChildEnd]) -> Iterator[Pair]:
    """Two ends in two processes, over the best transport of each kind, or over cma alone."""
    pair = Pair(*children, request.param)
    yield pair
    for end in reversed(children):
        end.stop()


def _own(world: World, seed: int, in_pool: int) -> Bytes:
    """Register blocks over NumPy arrays of this process, the first ``in_pool`` tensors over pool memory."""
    desc = CacheDesc(TENSORS, [BLOCKS, BLOCK], DataType.DT_UINT8)
    random = np.random.default_rng(seed)
    arrays = [random.integers(0, 256, (BLOCKS, BLOCK), dtype=np.uint8) for _ in range(TENSORS)]
    world.memory["arrays"] = arrays
    addresses = [array.ctypes.data for array in arrays]
    if in_pool:
        pooled = world.caches["pooled"] = world.cm.allocate_blocks_cache(desc)
        addresses[:in_pool] = pooled.tensor_addrs[:in_pool]
        for array, address in zip(arrays[:in_pool], addresses, strict=False):
            _at(address, array.nbytes)[:] = array.reshape(-1)
    world.caches["own"] = world.cm.register_blocks_cache(desc, addresses, KEY)
    return _bytes(world)


def _at(address: int, nbytes: int) -> NDArray[np.uint8]:
    return ExternalSegment(address, nbytes).view()


def _bytes(world: World) -> Bytes:
    return [_at(address, BLOCKS * BLOCK).reshape(BLOCKS, BLOCK).copy() for address in world.caches["own"].tensor_addrs]


def _pull(world: World, src: list[int], dst: list[int]) -> Bytes:
    world.cm.pull_blocks(KEY, world.caches["own"], src, dst)
    return _bytes(world)


def _push(world: World, src: list[int], dst: list[int]) -> Bytes:
    world.cm.push_blocks(KEY, world.caches["own"], src, dst)
    return _bytes(world)


def _unregister(world: World) -> None:
    world.cm.unregister_cache(world.caches["own"].cache_id)


def _explain(world: World) -> LinkStatistics:
    return world.dd.explain(1)


def _same(got: Bytes, wanted: Bytes) -> None:
    for tensor, (one, other) in enumerate(zip(got, wanted, strict=True)):
        np.testing.assert_array_equal(one, other, err_msg=f"tensor {tensor}")


@pytest.mark.parametrize("in_pool", [0, 2, TENSORS])
@pytest.mark.parametrize("push", [False, True])
def test_blocks_of_private_memory_move_and_nothing_else_does(apart: Pair, in_pool: int, push: bool) -> None:
    apart.start(rca=True)
    theirs = apart.prompt.do(_own, 1, in_pool)
    ours = apart.decoder.do(_own, 2, 0)
    src, dst = [3, 4, 5, 11, 0], [7, 8, 1, 2, 11]
    after = apart.decoder.do(_push if push else _pull, src, dst)
    source, target = (ours, theirs) if push else (theirs, ours)
    for one, other in zip(target, source, strict=True):
        one[dst] = other[src]
    _same(after, ours)
    _same(apart.prompt.do(_bytes), theirs)


def test_what_was_unregistered_is_not_read_again(apart: Pair) -> None:
    apart.start(rca=True)
    apart.prompt.do(_own, 1, 0)
    apart.decoder.do(_own, 2, 0)
    apart.decoder.do(_pull, [1], [2])
    before = apart.decoder.do(_bytes)
    apart.prompt.do(_unregister)
    with pytest.raises(CacheNotFound) as caught:
        apart.decoder.do(_pull, [1], [3])
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    _same(apart.decoder.do(_bytes), before)


def test_the_link_says_how_it_reaches_private_memory(apart: Pair) -> None:
    apart.start()
    there = apart.decoder.do(_explain)
    if apart.transport == "cma":
        assert (there.transport, there.reason) == ("cma", "the kernel lets us into the peer's memory")
    else:
        assert there.transport == "shm"
        assert there.reason.endswith("private memory by cma")


def _publish_row(world: World) -> Bytes:
    desc = CacheDesc(TENSORS, [2, BLOCK], DataType.DT_UINT8)
    cache = world.caches["row"] = world.cm.allocate_cache(desc, [CacheKey(1, 5), CacheKey(1, 6)])
    for seed, address in enumerate(cache.tensor_addrs):
        _at(address, 2 * BLOCK)[:] = np.random.default_rng(seed).integers(0, 256, 2 * BLOCK, dtype=np.uint8)
    return [_at(address, 2 * BLOCK).reshape(2, BLOCK).copy() for address in cache.tensor_addrs]


def _pull_row(world: World, key: CacheKey | CacheKeyByIdAndIndex) -> Bytes:
    arrays = [np.full((1, BLOCK), 0x5A, np.uint8) for _ in range(TENSORS)]
    desc = CacheDesc(TENSORS, [1, BLOCK], DataType.DT_UINT8)
    cache = world.cm.register_cache(desc, [array.ctypes.data for array in arrays])
    world.cm.pull_cache(key, cache)
    world.cm.unregister_cache(cache.cache_id)
    return arrays


def test_pool_memory_is_reached_and_its_key_consumed(apart: Pair) -> None:
    apart.start()
    rows = apart.prompt.do(_publish_row)
    _same(apart.decoder.do(_pull_row, CacheKey(1, 6)), [row[1:] for row in rows])
    with pytest.raises(CacheNotFound):
        apart.decoder.do(_pull_row, CacheKey(1, 6))
    _same(apart.decoder.do(_pull_row, CacheKeyByIdAndIndex(1, 1, 0)), [row[:1] for row in rows])
