"""v1: get_cache_tensors, the memory of a cache as arrays (interface §8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import CacheDesc, DataType, KvCache
from llm_datadist.views import tensor_views
from tests.support.v1 import DIRECT, POOL, start_end
from tests.support.world import fill

if TYPE_CHECKING:
    from llm_datadist import KvCacheManager
    from tests.support.ends import LocalEnd

pytestmark = pytest.mark.covers("KvCacheManager.get_cache_tensors")


@pytest.fixture(params=["pool", "direct"])
def prompt(end: LocalEnd, request: pytest.FixtureRequest) -> KvCacheManager:
    """A PROMPT's manager, with a pool and without any."""
    start_end(end, "PROMPT", **(POOL if request.param == "pool" else DIRECT))
    return end.world.dd.kv_cache_manager


@pytest.mark.parametrize("data_type", [t for t in DataType if t not in (DataType.DT_STRING, DataType.DT_BF16)])
def test_get_cache_tensors_is_the_memory_of_the_cache(prompt: KvCacheManager, data_type: DataType) -> None:
    cache = prompt.allocate_blocks_cache(CacheDesc(3, [4, 2, 3], data_type))
    for index in range(3):
        (tensor,) = prompt.get_cache_tensors(cache, index)
        array = tensor.numpy()
        assert (array.shape, array.itemsize) == ((4, 2, 3), data_type.itemsize)
        assert (tensor.tensor_desc.dtype, tensor.tensor_desc.shape) == (data_type, [4, 2, 3])
        assert array.ctypes.data == cache.per_device_tensor_addrs[0][index]
        array[:] = index
        before = tensor.numpy(copy=True)
        array[0] = 1
        assert (before == np.array(index, array.dtype)).all()
    values = [prompt.get_cache_tensors(cache, index)[0].numpy()[1, 0, 0] for index in range(3)]
    assert values == [np.array(index, dtype=values[0].dtype) for index in range(3)]


def test_bf16_is_read_as_float32(prompt: KvCacheManager) -> None:
    cache = prompt.allocate_cache(CacheDesc(1, [2, 4], DataType.DT_BF16))
    fill(cache._cache, 5)
    bits = np.array([[0x3F80, 0xC000, 0x0000, 0x7F80]] * 2, np.uint16)
    for row, values in zip(read_bits(cache), bits, strict=True):
        row[:] = values
    (tensor,) = prompt.get_cache_tensors(cache)
    np.testing.assert_array_equal(tensor.numpy(), np.array([[1.0, -2.0, 0.0, np.inf]] * 2, np.float32))
    assert tensor.numpy().dtype == np.float32


def read_bits(cache: KvCache) -> Any:
    return tensor_views(cache._cache)[0]
