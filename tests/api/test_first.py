"""Smoke test of the harness."""
from __future__ import annotations
from typing import TYPE_CHECKING, Any
import numpy as np
from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from tests.support.world import World, fill, read
if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tests.conftest import Pair

def publish(world: World) -> list[NDArray[np.uint8]]:
    world.caches["kv"] = world.cm.allocate_blocks_cache(CacheDesc(4, [10, 16], DataType.DT_FLOAT), BlocksCacheKey(1, 0))
    return fill(world.caches["kv"], 1)

def pull(world: World) -> tuple[list[NDArray[np.uint8]], list[NDArray[np.uint8]]]:
    world.caches["kv"] = cache = world.cm.allocate_blocks_cache(CacheDesc(4, [10, 16], DataType.DT_FLOAT))
    before = fill(cache, 2)
    world.cm.pull_blocks(BlocksCacheKey(1, 0), cache, [1, 2, 5], [7, 8, 0])
    return before, read(cache)

def test_blocks(pair: Pair) -> None:
    pair.start()
    source = pair.prompt.do(publish)
    before, after = pair.decoder.do(pull)
    for s, b, a in zip(source, before, after, strict=True):
        b[[7, 8, 0]] = s[[1, 2, 5]]
        np.testing.assert_array_equal(a, b)
