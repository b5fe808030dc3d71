"""A user's program over the whole public surface: type checkers accept it as it stands, and it runs.

It sees the library as it is installed and imports nothing of the tests; test_client.py checks and runs it.
"""

# pyright: strict

from __future__ import annotations

import asyncio

import numpy as np

import llm_datadist
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheManager,
    CacheNotFound,
    CacheTask,
    DataType,
    Grant,
    KvCache,
    KvCacheManager,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LlmConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    NotLinked,
    OutOfMemory,
    PeerLink,
    Placement,
    RegisterMemStatus,
    Status,
    Tensor,
    TensorDesc,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.cpp_api import CacheIndex, ClusterInfo, LlmDataDist, LlmRole
from llm_datadist.devices import CudaDevice
from llm_datadist.metrics import LinkStatistics, Statistics
from llm_datadist.views import tensor_views

PAGED = CacheDesc(num_tensors=4, shape=[8, 16], data_type=DataType.DT_FLOAT16, placement=Placement.DEVICE)
BLOCKS = BlocksCacheKey(cluster_id=1, model_id=0)


class Ready(LayerSynchronizer):
    """Every layer is ready."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return layer_index >= 0


def options(*, v2: bool, rca: bool = False, **extra: str) -> dict[str, str]:
    config: LLMConfig = LlmConfig()
    config.device_id = 0
    config.enable_cache_manager = v2
    config.enable_remote_cache_accessible = rca
    config.listen_ip_info = "127.0.0.1:0"
    config.sync_kv_timeout = 10_000
    config.link_total_time, config.link_retry_count = 30, 2
    config.mem_pool_cfg = '{"memory_size": 8388608, "page_shift": 12}'
    config.mem_utilization = 0.9
    config.ge_options = {"ge.flowGraphMemMaxSize": "8388608"}
    return config.generate_options() | {f"llm.{name}": value for name, value in extra.items()}


def linked(role: LLMRole, cluster_id: int, given: dict[str, str], peer: LLMDataDist | None = None) -> LLMDataDist:
    datadist = LLMDataDist(role, cluster_id, device=CudaDevice(0, mover="copy") if "cuda" in given else None)
    datadist.init(given)
    if peer is not None:
        cluster = LLMClusterInfo()
        cluster.remote_cluster_id = peer.cluster_id
        cluster.append_local_ip_info("127.0.0.1", 0)
        cluster.append_remote_ip_info("127.0.0.1", peer.listen_port or 0)
        overall, statuses = datadist.link_clusters([cluster], timeout=10_000)
        assert overall is LLMStatusCode.LLM_SUCCESS is statuses[0]
        assert Status(overall).is_ok()
    return datadist


def move_blocks(prompt: CacheManager, decoder: CacheManager) -> None:
    source: Cache = prompt.allocate_blocks_cache(PAGED, BLOCKS)
    target: Cache = decoder.allocate_blocks_cache(PAGED)
    for number, view in enumerate(tensor_views(source)):
        view[:] = number
    decoder.pull_blocks(BLOCKS, target, [0, 1], (6, 7), src_layer_range=range(1), dst_layer_range=range(1, 2))
    decoder.pull_blocks(BLOCKS, target, np.arange(4), dst_blocks=np.array([3, 2, 1, 0], dtype=np.int32))
    decoder.pull_blocks(BLOCKS, target, range(2), [np.int64(1), np.int8(0)])
    grant: Grant = source.grant(np.arange(2), ttl=60.0)
    claimed: Grant = decoder.claim_grant(1, token=grant.token, readers=1, wait=False)
    decoder.pull_blocks(BLOCKS, target, [0], [4], grant=Grant.from_bytes(claimed.to_bytes()))
    claimed.release()
    grant.revoke()
    decoder.copy_blocks(target, {0: [5, 6]})
    decoder.copy_blocks(target, {np.int64(0): range(5, 7), np.int64(1): (4,)})
    decoder.copy_blocks(target, {0: np.array([5, 6])})
    listed: dict[int, list[int]] = {1: [2]}
    decoder.copy_blocks(target, listed)
    asyncio.run(later(decoder, target))
    for number, view in enumerate(tensor_views(target)):
        assert (view[:5] == number).all()
    host = np.zeros((4, 2, 16), dtype=np.float16)
    outside = CacheDesc(4, (2, 16), DataType.DT_FLOAT16, Placement.HOST)
    decoder.swap_blocks(target, Cache.create_cpu_cache(outside, [each.ctypes.data for each in host]), {0: 0, 1: 1})
    assert (host[3] == 3).all()
    prompt.deallocate_blocks_cache(source)


def short_form() -> None:
    config = LLMConfig(listen_ip_info="127.0.0.1:0", mem_pool_cfg="8MiB", host_mem_pool_cfg=1 << 20)
    with LLMDataDist(LLMRole.PROMPT, 1, config=config) as prompt:
        source = prompt.cache_manager.allocate_blocks_cache(PAGED, BLOCKS)
        prompt.answer_questions("lend", lambda question: source.grant([1], ttl=60.0).to_bytes())
        decoder = LLMDataDist(LLMRole.DECODER, config=LLMConfig(mem_pool_cfg="8MiB", sync_kv_timeout=10_000))
        with decoder, decoder.connect(f"127.0.0.1:{prompt.listen_port}", timeout=10_000) as link:
            held: PeerLink = link
            grant = Grant.from_bytes(held.ask("lend", b""))
            target = decoder.cache_manager.allocate_blocks_cache(PAGED)
            decoder.cache_manager.pull_blocks(BlocksCacheKey(link.cluster_id), target, [1], [2], grant=grant)
            used: str = link.explain().transport
            assert used in ("inproc", "shm")
            link.close(force=False)


async def later(manager: CacheManager, cache: Cache) -> None:
    await manager.pull_blocks_async(BLOCKS, cache, [7], [6])
    await asyncio.gather(manager.copy_blocks_async(cache, {0: [7]}), manager.copy_blocks_async(cache, {1: [6]}))


def move_rows(prompt: CacheManager, decoder: CacheManager) -> None:
    keys = [CacheKey(1, req_id=number) for number in range(3)]
    source = prompt.allocate_cache(PAGED, keys)
    target = decoder.allocate_cache(PAGED)
    key: CacheKey | CacheKeyByIdAndIndex = keys[2]
    decoder.pull_cache(key, target, batch_index=1, size=-1)
    decoder.copy_cache(target, target, dst_batch_index=3, src_batch_index=1, req_id=7)
    task: CacheTask = decoder.transfer_cache_async(
        target, Ready(), [TransferConfig(1, source.tensor_addrs[:4], range(2), src_batch_index=0)]
    )
    results: list[LLMStatusCode | None] = task.get_results(timeout_in_millis=10_000)
    assert task.synchronize() is results[0]
    prompt.remove_cache_key(keys[0])
    prompt.check_cache_key(keys[0])
    registered = decoder.register_cache(CacheDesc(4, [8, 16], DataType.DT_BF16), target.tensor_addrs)
    decoder.remap_registered_memory([MemInfo(Memtype.MEM_TYPE_DEVICE, addr=4096, size=4096)])
    decoder.unregister_cache(registered.cache_id)
    try:
        decoder.pull_cache(CacheKeyByIdAndIndex(9, cache_id=1), target)
    except (NotLinked, CacheNotFound, OutOfMemory) as error:
        failure: LLMException = error
        assert (failure.status_code, failure.retryable, failure.peer) == (LLMStatusCode.LLM_NOT_YET_LINK, True, 9)


def push(prompt: CacheManager, decoder: CacheManager) -> None:
    target = prompt.register_blocks_cache(
        PAGED, prompt.allocate_blocks_cache(PAGED, granted_only=True).tensor_addrs, BLOCKS
    )
    source = decoder.allocate_blocks_cache(PAGED)
    decoder.push_blocks(BLOCKS, source, [1], np.array([2]), src_layer_range=range(2), dst_layer_range=range(2))
    config = TransferWithCacheKeyConfig(BLOCKS, src_layer_range=range(2), dst_layer_range=range(2))
    config.src_layer_range = range(1, 2)
    config.dst_layer_range = range(1)
    assert decoder.transfer_cache_async(source, Ready(), [config], np.arange(2), [4, 5]).synchronize() == 0
    prompt.unregister_cache(target.cache_id)


def own_arrays(manager: CacheManager, cluster_id: int) -> None:
    layers = [np.zeros((2, 8, 16), dtype=np.float16) for _ in range(2)]
    halves = [half for kv in layers for half in (kv[0], kv[1])]
    cache: Cache = manager.register_tensors(halves, BlocksCacheKey(cluster_id, 3), granted_only=True)
    assert cache.cache_desc.data_type is CacheDesc(4, [8, 16], np.float16).data_type is DataType.DT_FLOAT16
    manager.unregister_cache(cache.cache_id)
    rows = manager.register_tensors((layers[0],), [CacheKey(cluster_id, 8)], placement=Placement.HOST)
    assert (rows.is_blocks_cache, CacheDesc(1, [2], layers[0].dtype).size) == (False, 4)
    manager.unregister_cache(rows.cache_id)


def look(datadist: LLMDataDist) -> None:
    statistics: Statistics = datadist.statistics()
    link: LinkStatistics = datadist.explain(statistics.links[0].remote_cluster_id)
    print(llm_datadist.__version__, datadist.incarnation, link.transport, statistics.pools[0].used_bytes)
    try:
        status = datadist.query_register_mem_status(comm_id=1)
    except NotLinked:
        status = RegisterMemStatus.FAILED
    assert status is not RegisterMemStatus.OK


def older(prompt: KvCacheManager, decoder: KvCacheManager) -> None:
    paged: KvCache = prompt.allocate_blocks_cache(PAGED, BLOCKS)
    target = decoder.allocate_blocks_cache(PAGED)
    decoder.pull_blocks(BLOCKS, target, [0, 1], range(2))
    tensor: Tensor = decoder.get_cache_tensors(target, tensor_index=3)[0]
    described: TensorDesc = Tensor(tensor.numpy(copy=True)).tensor_desc
    assert (described.shape, described.dtype, decoder.is_initialized()) == ([8, 16], DataType.DT_FLOAT16, True)
    prompt.deallocate_cache(paged)


def shaped_as_in_cpp() -> None:
    instance = LlmDataDist(7, LlmRole.kDecoder)
    status: LLMStatusCode = instance.Initialize({"llm.DeviceId": "0"})
    code, each = instance.LinkLlmClusters([ClusterInfo(8)], timeout=10)
    print(status, code, each, CacheIndex(cluster_id=8, cache_id=1), instance.Finalize())


def main() -> None:
    """Run all of it."""
    for v2, rca in ((True, False), (True, True), (False, False)):
        prompt = linked(LLMRole.PROMPT, 1, options(v2=v2, rca=rca))
        decoder = linked(LLMRole.DECODER, 2, options(v2=v2, rca=rca, StrictTypes="1"), prompt)
        if not v2:
            older(prompt.kv_cache_manager, decoder.kv_cache_manager)
        elif rca:
            push(prompt.cache_manager, decoder.cache_manager)
        else:
            move_blocks(prompt.cache_manager, decoder.cache_manager)
            move_rows(prompt.cache_manager, decoder.cache_manager)
            own_arrays(decoder.cache_manager, 2)
            look(decoder)
        decoder.finalize()
        prompt.finalize()
    short_form()
    shaped_as_in_cpp()


if __name__ == "__main__":
    main()
