"""The sequence of vllm-ascend's first connectors, in two processes.

Options by hand, the v1 manager, equal cluster ids at both ends, four caches per request that the producer deallocates
at once, deterministic ids, keys that are released by the pull, buffers that the consumer keeps until the next request.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest

from llm_datadist import CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType
from llm_datadist.errors import CacheNotFound
from llm_datadist.kv_cache import Tensor, TensorDesc
from tests.support.linking import SUCCESS, info, link, unlink
from tests.support.moves import picture, wait_until
from tests.support.world import World

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llm_datadist import KvCache
    from tests.support.pairs import Pair

pytestmark = pytest.mark.covers("vllm-ascend, v0 connectors", "LLMDataDist.kv_cache_manager")

CLUSTER: Final = 0  # on both sides
LAYERS, TOKENS, HEADS, DIM = 3, 17, 2, 8
#: Key, value, input ids, hidden states: model id -> shape with batch 1, everything of a request in one row; type.
BUFFERS: Final = {
    1: ([1, LAYERS, TOKENS * HEADS * DIM], DataType.DT_FLOAT16),
    2: ([1, LAYERS, TOKENS * HEADS * DIM], DataType.DT_FLOAT16),
    3: ([1, TOKENS], DataType.DT_INT32),
    4: ([1, TOKENS * 32], DataType.DT_BF16),
}


def _desc(model: int) -> CacheDesc:
    shape, data_type = BUFFERS[model]
    return CacheDesc(1, list(shape), data_type)


def _tensor(cache: KvCache) -> NDArray[np.uint8]:
    """Build a tensor on the raw address, as ``create_npu_tensors(shape, dtype, addrs)`` does; its bytes."""
    (address,) = cache.per_device_tensor_addrs[0]
    return Tensor(address, TensorDesc(DataType.DT_UINT8, [cache.cache_desc.size])).numpy()


def _data(request: str, model: int) -> NDArray[np.uint8]:
    random = np.random.default_rng([zlib.adler32(request.encode()), model])
    return random.integers(0, 256, _desc(model).size, dtype=np.uint8)


def _key(request: str, model: int) -> CacheKey:
    return CacheKey(CLUSTER, zlib.adler32(request.encode()), model)


def insert(world: World, request: str) -> list[int]:
    """The producer's half of a request; returns the cache ids."""
    manager = world.dd.kv_cache_manager
    ids = []
    for model in BUFFERS:
        cache = manager.allocate_cache(_desc(model), [_key(request, model)])
        _tensor(cache)[:] = _data(request, model)
        ids.append(cache.cache_id)
        manager.deallocate_cache(cache)  # at once: it is freed when it has been pulled
    return ids


def select(world: World, request: str, by_id: bool) -> list[bool]:
    """The consumer's half; returns which buffers hold every byte of the request."""
    manager = world.dd.kv_cache_manager
    for cache in world.memory.pop("buffers", ()):
        manager.deallocate_cache(cache)  # those of the request before
    world.memory["buffers"] = buffers = []
    for number, model in enumerate(BUFFERS, start=1):
        buffer = manager.allocate_cache(_desc(model))
        key = CacheKeyByIdAndIndex(CLUSTER, number, 0) if by_id else _key(request, model)
        manager.pull_cache(key, buffer, 0)
        buffers.append(buffer)
    with pytest.raises(CacheNotFound):  # it was pulled already
        manager.pull_cache(_key(request, 1), buffers[0], 0)
    return [bool((_tensor(each) == _data(request, model)).all()) for model, each in zip(BUFFERS, buffers, strict=True)]


@pytest.mark.parametrize(("transport", "by_id"), [("auto", False), ("tcp", True)])
def test_r05_r12_r28_the_first_connectors_of_vllm_ascend(shm_pair: Pair, transport: str, by_id: bool) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    options = {"llm.SyncKvCacheWaitTime": "5000", "ge.exec.deviceId": "0", "llm.Transport": transport}
    port = prompt.do(World.start, "PROMPT", CLUSTER, options | {"llm.listenIpInfo": "127.0.0.1:0"})
    decoder.do(World.start, "DECODER", CLUSTER, options | {"ge.exec.deviceId": "1"})
    assert decoder.do(link, [info(CLUSTER, port)]) == SUCCESS
    for first, request in ((1, "cmpl-7c1e"), (5, "cmpl-7c1f"), (9, "cmpl-8000")):
        assert prompt.do(insert, request) == list(range(first, first + 4))
        assert prompt.do(picture).caches.deferred == 4
        assert decoder.do(select, request, by_id and first == 1) == [True] * 4
        # Pulled: the keys are gone, and with them the memory without an owner.
        # The tables know it a moment before the pool has its pages back.
        wait_until(lambda: prompt.do(picture).pools[0].used_bytes == 0)
        assert (prompt.do(picture).keys, prompt.do(picture).caches.nbytes) == ((), 0)
    assert decoder.do(picture).caches.live == 4
    assert decoder.do(unlink, [info(CLUSTER, port)]) == SUCCESS
