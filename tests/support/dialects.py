"""The two dialects beside the CacheManager's, behind the same words: KvCacheManager (v1) and the C++-shaped calls.

A test sends them to an end: ``end.do(dialect.pull_row, ...)``. A call returns its status and the text of its reason,
whether it was raised or returned. The prompt is cluster 1, the decoder cluster 2; cache ids count from 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMStatusCode,
    Placement,
    TransferConfig,
)
from llm_datadist.cpp_api import CacheIndex, KvCacheExtParam, LlmRole
from llm_datadist.errors import LLMException
from tests.support import cpp, linking
from tests.support.cpp import HOST, Shape
from tests.support.layers import Always
from tests.support.memory import user_memory
from tests.support.moves import Use, show
from tests.support.v1 import POOL, kv_call, kv_make, kv_of
from tests.support.world import fill, make_config

if TYPE_CHECKING:
    from tests.support.moves import Bytes
    from tests.support.world import World

    Answer = tuple[LLMStatusCode, str]

OK = LLMStatusCode.LLM_SUCCESS
#: First and last layer here and there, tensors per layer.
Layers = tuple[tuple[int, int], tuple[int, int], int] | None
Pairs = list[tuple[int, int]]
"""(dst block, src block), as in :func:`tests.support.moves.moved`."""


class V1:
    """KvCacheManager. A blocks cache has its id as the model id of its key."""

    timed_out = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    full = LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY

    def start(self, world: World, role: str, transport: str, timeout: int = 10_000, device: Any = None) -> int | None:
        settings = POOL | {"sync_kv_timeout": timeout}
        if role == "PROMPT":
            settings["listen_ip_info"] = "127.0.0.1:0"
        extra = {"llm.Transport": "auto" if transport == "shm" else transport}  # raw addresses are written by cma
        return world.start(role, 1 if role == "PROMPT" else 2, make_config(**settings, extra=extra), device)

    # The decoder, cluster 2, links to the prompt, cluster 1, and pulls; the prompt pushes.

    def link(self, world: World, port: int | None) -> Any:
        return linking.link(world, [linking.info(1, port)])

    def unlink(self, world: World, port: int | None) -> Any:
        return linking.unlink(world, [linking.info(1, port)])

    def make(self, world: World, name: str, shape: Shape, seed: int, paged: bool = False) -> Bytes:
        key = BlocksCacheKey(world.dd.cluster_id, len(world.caches) + 1)
        keyed = paged and world.dd.listen_port is not None  # a decoder's caches have none
        desc = CacheDesc(shape.tensors, [shape.rows, shape.width], DataType.DT_INT32)
        return kv_make(world, name, desc, seed, blocks=paged, blocks_key=key if keyed else None)

    def host(self, world: World, name: str, shape: Shape, seed: int) -> Bytes:
        desc = CacheDesc(shape.tensors, [shape.rows, shape.width], DataType.DT_INT32, Placement.HOST)
        world.memory[f"kv {name}"] = cache = KvCache.create_cpu_cache(desc, [user_memory(world, name, desc)])
        world.caches[name] = cache._cache
        return fill(cache._cache, seed)

    show = staticmethod(show)

    def allocate(self, world: World, nbytes: int) -> Answer:
        return _v1(world, "allocate_cache", CacheDesc(1, [1, nbytes], DataType.DT_UINT8))

    def deallocate(self, world: World, name: str) -> Answer:
        return _v1(world, "deallocate_cache", Use(name))

    def copy_row(
        self, world: World, src: str, dst: str, src_row: int, dst_row: int, offset: int = 0, size: int = -1
    ) -> Answer:
        return _v1(world, "copy_cache", Use(dst), Use(src), dst_row, src_row, offset, size)

    def copy_blocks(self, world: World, name: str, sources: list[int], lists: list[list[int]]) -> Answer:
        copies = {source: [targets[at] for targets in lists] for at, source in enumerate(sources)}
        return _v1(world, "copy_blocks", Use(name), copies)

    def swap(self, world: World, src: str, dst: str, pairs: Pairs) -> Answer:
        return _v1(world, "swap_blocks", Use(src), Use(dst), {source: target for target, source in pairs})

    def pull_row(
        self, world: World, number: int, row: int, name: str, to: int, size: int = -1, layers: Layers = None
    ) -> Answer:
        key = CacheKeyByIdAndIndex(1, number, row)
        return _v1(world, "pull_cache", key, Use(name), to, size, **_ranges(layers))

    def pull_blocks(self, world: World, number: int, name: str, pairs: Pairs, layers: Layers = None) -> Answer:
        targets, sources = [dst for dst, _ in pairs], [src for _, src in pairs]
        return _v1(world, "pull_blocks", BlocksCacheKey(1, number), Use(name), sources, targets, **_ranges(layers))

    def place(self, world: World, name: str, row: int) -> list[int]:
        """What the other end has to know to push into a row: the addresses, or cache id and row."""
        cache = kv_of(world, name)
        return [address + row * cache.cache_desc.shape[1] * 4 for address in cache.per_device_tensor_addrs[0]]

    def push_row(self, world: World, name: str, row: int, place: list[int]) -> Answer:
        return _sent(world, name, TransferConfig(2, place, None, row))

    def push_blocks(self, world: World, name: str, place: list[int], pairs: Pairs) -> Answer:
        sources, targets = [src for _, src in pairs], [dst for dst, _ in pairs]
        return _sent(world, name, TransferConfig(2, place), sources, targets)


def _v1(world: World, method: str, *args: Any, **kwargs: Any) -> Answer:
    try:
        kv_call(world, method, *args, **kwargs)
    except LLMException as error:
        return error.status_code, str(error)
    return OK, ""


def _sent(world: World, name: str, config: TransferConfig, *lists: list[int]) -> Answer:
    task = kv_call(world, "transfer_cache_async", Use(name), Always(), [config], *lists)
    status: LLMStatusCode = task.synchronize(20_000)
    assert task.get_results() == [status]
    return status, ""


def _ranges(layers: Layers) -> dict[str, Any]:
    if layers is None:
        return {}
    here, there, per_layer = layers
    return {
        "src_layer_range": range(here[0], here[1] + 1),
        "dst_layer_range": range(there[0], there[1] + 1),
        "tensor_num_per_layer": per_layer,
    }


class Cpp:
    timed_out = LLMStatusCode.LLM_TIMEOUT
    full = LLMStatusCode.LLM_OUT_OF_MEMORY

    def start(self, world: World, role: str, transport: str, timeout: int = 10_000, device: Any = None) -> int | None:
        options = {"llm.SyncKvCacheWaitTime": str(timeout)}
        made, cluster_id = (LlmRole.kPrompt, 1) if role == "PROMPT" else (LlmRole.kDecoder, 2)
        return cpp.start(world, made, cluster_id, transport, options, device)

    def link(self, world: World, port: int | None) -> Any:
        return cpp.run(world, "LinkLlmClusters", [cpp.cluster(1, port or 0)], 10_000)

    def unlink(self, world: World, port: int | None) -> Any:
        return cpp.run(world, "UnlinkLlmClusters", [cpp.cluster(1, port or 0)], 10_000)

    def make(self, world: World, name: str, shape: Shape, seed: int, paged: bool = False) -> Bytes:
        return cpp.made(world, name, shape, seed)  # serves as both

    def host(self, world: World, name: str, shape: Shape, seed: int) -> Bytes:
        return cpp.host_memory(world, name, Shape(shape.tensors, shape.rows, shape.width, HOST), seed)

    show = staticmethod(cpp.show)

    def allocate(self, world: World, nbytes: int) -> Answer:
        return cpp.attempt(world, "AllocateCache", Shape(1, 1, nbytes // 4).desc)

    def deallocate(self, world: World, name: str) -> Answer:
        return cpp.attempt(world, "DeallocateCache", world.memory[f"cache {name}"].cache_id)

    def copy_row(
        self, world: World, src: str, dst: str, src_row: int, dst_row: int, offset: int = 0, size: int = -1
    ) -> Answer:
        return cpp.attempt(world, "CopyKvCache", Use(src), Use(dst), src_row, dst_row, offset, size)

    def copy_blocks(self, world: World, name: str, sources: list[int], lists: list[list[int]]) -> Answer:
        return cpp.attempt(world, "CopyKvBlocks", Use(name), Use(name), sources, lists)

    def swap(self, world: World, src: str, dst: str, pairs: Pairs) -> Answer:
        sources, targets = [source for _, source in pairs], [target for target, _ in pairs]
        return cpp.attempt(world, "CopyKvBlocks", Use(src), Use(dst), sources, [targets])

    def pull_row(
        self, world: World, number: int, row: int, name: str, to: int, size: int = -1, layers: Layers = None
    ) -> Answer:
        return cpp.attempt(world, "PullKvCache", CacheIndex(1, number, row), Use(name), to, size, _ext(layers))

    def pull_blocks(self, world: World, number: int, name: str, pairs: Pairs, layers: Layers = None) -> Answer:
        targets, sources = [dst for dst, _ in pairs], [src for _, src in pairs]
        return cpp.attempt(world, "PullKvBlocks", CacheIndex(1, number), Use(name), sources, targets, _ext(layers))

    def place(self, world: World, name: str, row: int) -> CacheIndex:
        return cpp.index(world, name, row)

    def push_row(self, world: World, name: str, row: int, place: CacheIndex) -> Answer:
        return cpp.attempt(world, "PushKvCache", Use(name), place, row)

    def push_blocks(self, world: World, name: str, place: CacheIndex, pairs: Pairs) -> Answer:
        sources, targets = [src for _, src in pairs], [dst for dst, _ in pairs]
        return cpp.attempt(world, "PushKvBlocks", Use(name), place, sources, targets)


def _ext(layers: Layers) -> KvCacheExtParam:
    return KvCacheExtParam() if layers is None else KvCacheExtParam(*layers)


Dialect = V1 | Cpp
