"""KvCacheManager, the v1 interface to caches (interface §8)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from llm_datadist._cache.geometry import CacheKind
from llm_datadist._checks import check_int32, check_rule, check_type
from llm_datadist._native.public_call import public_calls, whole
from llm_datadist._transfer import arguments, calls
from llm_datadist._transfer.arguments import ARGUMENTS, check, layer_selection
from llm_datadist._transfer.calls import BlocksTransfer, EngineUser, LayerwiseArguments, RowTransfer
from llm_datadist._transfer.linking import v1_code, v1_codes
from llm_datadist.errors import LLMStatusCode
from llm_datadist.kv_cache import KvCache, Tensor, TensorDesc, cache_of
from llm_datadist.types import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, LLMRole, Placement
from llm_datadist.views import host_tensors

if TYPE_CHECKING:
    from llm_datadist._transfer.arguments import Bindings, Rules
    from llm_datadist._transfer.engine import Engine
    from llm_datadist._transfer.layerwise import CacheTask
    from llm_datadist.types import Cache, LayerSynchronizer, TransferConfig
    from llm_datadist.types.descriptors import Block, BlockNumbers, Several, To


def _device_cache(name: str, value: object) -> Cache:
    """Return the v2 handle of a KvCache on the device (interface R16)."""
    cache = cache_of(check_type(name, value, KvCache))
    _require_device(name, cache.cache_desc)
    return cache


def _require_device(name: str, desc: CacheDesc) -> None:
    check_rule(
        desc.placement is Placement.DEVICE, f"{name}: placement is {desc.placement.name}, only DEVICE is possible here"
    )


#: v1's differences: handles are KvCaches on the device.
_ARGUMENTS: Final[Rules] = {
    **ARGUMENTS,
    **dict.fromkeys(("cache", "src_cache", "kv_cache", "decoder_kv_cache", "dst", "src"), _device_cache),
    **dict.fromkeys(("prompt_blocks", "decoder_blocks"), ARGUMENTS["src_blocks"]),
}


@public_calls(here=("copy_cache", "copy_blocks", "swap_blocks", "pull_cache", "pull_blocks"))
class KvCacheManager(EngineUser):
    """Caches of one LLMDataDist in v1 mode; ``LLMDataDist.kv_cache_manager`` returns it.

    A PROMPT binds and removes keys; a DECODER links and pulls; other roles get ParamError. At a MIX, only blocks caches
    can get a key. All caches are on the device: HOST placement, also a CPU cache outside ``swap_blocks``, is a
    ParamError. "v2" below is the method of the same name of :class:`~llm_datadist.cache_manager.CacheManager`.

    The errors, and the state after each, are v2's, with v1's statuses: ``LLM_WAIT_PROCESS_TIMEOUT`` for
    ``LLM_TIMEOUT``, ``LLM_DEVICE_OUT_OF_MEMORY`` for ``LLM_OUT_OF_MEMORY``, ``LLM_FAILED`` for a key in use. After
    ``finalize`` ``is_initialized`` still works. Threads: any.

    Source: interface §8.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        # Ids of caches with dropped handles. KvCache.__del__ adds them under any lock, so this has none.
        self._forgotten: deque[int] = deque()

    def is_initialized(self) -> bool:
        """Return True until ``finalize``."""
        return self._of.alive

    @property
    def _engine(self) -> Engine:
        engine = super()._engine
        if self._forgotten:
            self._deallocate_forgotten(engine)
        return engine

    @whole
    def _deallocate_forgotten(self, engine: Engine) -> None:
        while self._forgotten:
            try:
                cache_id = self._forgotten.popleft()
            except IndexError:  # another thread was quicker
                break
            engine.caches.deallocate(cache_id)

    def _cut_off(self, result: object) -> None:
        super()._cut_off(cache_of(result) if isinstance(result, KvCache) else result)

    def _require_role(self, call: str, role: LLMRole) -> None:
        now = self._of.options.role
        check_rule(now is role, f"{call}: only a {role.name} may, and this is a {now.name}")

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: list[CacheKey] | tuple[CacheKey, ...] = ()) -> KvCache:
        """Allocate a continuous cache on the device; key i names batch row i.

        The memory is of ``mem_pool_cfg``, else of ``ge.flowGraphMemMaxSize`` x ``mem_utilization``, else the cache's
        own (interface R12). It is freed once the cache is deallocated *and* its keys are pulled or removed.

        Args:
            cache_keys: At most ``shape[0]`` keys, only at a PROMPT.
        """
        self._engine  # noqa: B018 (a finalized manager raises before anything else)
        _, keys = check(_ARGUMENTS, cache_desc=cache_desc, cache_keys=cache_keys)
        _require_device("cache_desc", cache_desc)
        if keys:
            self._require_role("allocate_cache with cache_keys", LLMRole.PROMPT)
        return self._allocate("allocate_cache", cache_desc, CacheKind.CACHE, keys)

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> KvCache:
        """Allocate a blocks (paged) cache on the device, in the memory of :meth:`allocate_cache`.

        Args:
            blocks_cache_key: Key for peers, one cache per ``model_id``; not at a DECODER.
        """
        self._engine  # noqa: B018 (as above)
        _, keys = check(_ARGUMENTS, cache_desc=cache_desc, blocks_cache_key=blocks_cache_key)
        _require_device("cache_desc", cache_desc)
        check_rule(
            not keys or self._of.options.role is not LLMRole.DECODER,
            "blocks_cache_key: a DECODER's caches are not pulled, so they have no key; leave it out",
        )
        return self._allocate("allocate_blocks_cache", cache_desc, CacheKind.BLOCKS, keys)

    def _allocate(self, call: str, cache_desc: CacheDesc, kind: CacheKind, keys: Bindings) -> KvCache:
        with v1_codes():
            return KvCache(calls.allocate(self._engine, call, cache_desc, kind, keys), self._forgotten)

    def deallocate_cache(self, cache: KvCache) -> None:
        """Deallocate a cache of either kind, as v2; empties ``per_device_tensor_addrs``."""
        engine = self._engine
        (handle,) = check(_ARGUMENTS, cache=cache)
        with v1_codes():
            calls.deallocate(engine, "deallocate_cache", handle)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key, as v2. Only at a PROMPT."""
        engine = self._engine
        check_type("cache_key", cache_key, CacheKey)
        self._require_role("remove_cache_key", LLMRole.PROMPT)
        with v1_codes(), engine.meters.span("remove_cache_key", "%s", cache_key):
            engine.caches.remove_key(cache_key)

    def copy_cache(
        self,
        dst: KvCache,
        src: KvCache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copy a range of a row to the same place of another row, as v2."""
        rows = {"dst": dst, "src": src, "dst_batch_index": dst_batch_index, "src_batch_index": src_batch_index}
        with v1_codes():
            self._perform(calls.copy_cache(self._engine, _ARGUMENTS, req_id, **rows, offset=offset, size=size))

    def copy_blocks(self, cache: KvCache, copy_block_info: dict[Block, Several]) -> None:
        """Copy blocks inside a blocks cache, as v2: ``{src_block: [dst_block, ...]}``, in order."""
        with v1_codes():
            self._perform(calls.copy_blocks(self._engine, _ARGUMENTS, cache, copy_block_info))

    def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: dict[Block, To]) -> None:
        """Copy blocks between device and host memory, as v2: ``{src_block: dst_block}``, in order.

        ``KvCache.create_cpu_cache`` makes the host side. A row of a continuous cache counts as a block.
        """
        engine = self._engine
        check_type("src", src, KvCache)
        check_type("dst", dst, KvCache)
        (pairs,) = check(_ARGUMENTS, src_to_dst=src_to_dst)
        with v1_codes():
            calls.swap_blocks(engine, cache_of(src), cache_of(dst), pairs, ("src", "dst"))(engine.deadline())

    def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """Return a list with one tensor of the cache, over the cache's own memory.

        Writes to its ``numpy()`` are writes to the cache, except for ``DT_BF16``, which is copied to float32.

        Raises:
            ParamError: ``tensor_index`` outside [0, num_tensors), a deallocated cache, or text (``DT_STRING``).
        """
        engine = self._engine
        calls.local_id(engine, "get_cache_tensors", "cache", cache_of(check_type("cache", cache, KvCache)))
        index = check_int32("tensor_index", tensor_index)
        desc = cache.cache_desc
        check_rule(
            0 <= index < desc.num_tensors, f"tensor_index={index}: the cache has {desc.num_tensors} tensors, from 0"
        )
        with v1_codes():
            return [Tensor(host_tensors(cache_of(cache))[index], TensorDesc(desc.data_type, list(desc.shape)))]

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        kv_cache: KvCache,
        batch_index: int = 0,
        size: int = -1,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_cache_offset: int | None = None,
        dst_cache_offset: int | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Pull a row of a PROMPT's continuous cache into row ``batch_index`` of ``kv_cache``.

        As v2 without RCA, plus offsets. Neither they nor ``size`` make a pull partial (interface R5).

        Args:
            cache_key: The PROMPT's row, by key or by id.
            size: Bytes per tensor. Default: -1, the local row after ``dst_cache_offset``.
            src_cache_offset, dst_cache_offset: Bytes into the row of every tensor. Default: None, 0.
        """
        engine = self._engine
        self._require_role("pull_cache", LLMRole.DECODER)
        check_type("cache_key", cache_key, (CacheKey, CacheKeyByIdAndIndex))
        cache, row, nbytes = check(_ARGUMENTS, kv_cache=kv_cache, batch_index=batch_index, size=size)
        check_rule(not cache.is_blocks_cache, "kv_cache: a blocks cache; use pull_blocks")
        arguments.byte_count("size", size)
        src_offset, dst_offset = check(_ARGUMENTS, src_cache_offset=src_cache_offset, dst_cache_offset=dst_cache_offset)
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer)
        arguments.check_single_id(cache_key)
        name = arguments.remote_name(cache_key, None)
        cache_id = calls.local_id(engine, "pull_cache", "kv_cache", cache)
        given = engine, "kv_cache", cache_id, layers, row, nbytes, src_offset, dst_offset
        with v1_codes():
            RowTransfer(*given, what="pull_cache", name=name).run(engine.deadline())

    def pull_blocks(
        self,
        prompt_cache_key: BlocksCacheKey,
        decoder_kv_cache: KvCache,
        prompt_blocks: BlockNumbers,
        decoder_blocks: BlockNumbers,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Pull blocks of a PROMPT's cache: ``prompt_blocks[i]`` to ``decoder_blocks[i]``, in list order.

        Nothing is consumed. Only at a DECODER.

        Args:
            prompt_cache_key: The PROMPT's cache; its cluster id selects the link.
            prompt_blocks, decoder_blocks: Block numbers, not empty and equally many.
        """
        engine = self._engine
        self._require_role("pull_blocks", LLMRole.DECODER)
        check_type("prompt_cache_key", prompt_cache_key, BlocksCacheKey)
        cache, sources, targets = check(
            _ARGUMENTS, decoder_kv_cache=decoder_kv_cache, prompt_blocks=prompt_blocks, decoder_blocks=decoder_blocks
        )
        arguments.check_pairs(sources, targets, ("prompt_blocks", "decoder_blocks"))
        check_rule(cache.is_blocks_cache, "decoder_kv_cache: not a blocks cache; use pull_cache")
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer)
        name = arguments.remote_name(prompt_cache_key, None)
        cache_id = calls.local_id(engine, "pull_blocks", "decoder_kv_cache", cache)
        given = engine, "decoder_kv_cache", cache_id, layers, targets, sources, "decoder_blocks"
        with v1_codes():
            BlocksTransfer(*given, what="pull_blocks", name=name).run(engine.deadline())

    def transfer_cache_async(
        self,
        src_cache: KvCache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: list[TransferConfig] | tuple[TransferConfig, ...],
        src_block_indices: BlockNumbers | None = None,
        dst_block_indices: BlockNumbers | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Push a cache to peers' addresses layer by layer. Only at a PROMPT.

        As v2 without RCA. The DECODER links, and tells its ``per_device_tensor_addrs`` by other means.

        Source: interface §8, §6.14.
        """
        engine = self._engine
        self._require_role("transfer_cache_async", LLMRole.PROMPT)
        (cache,) = check(_ARGUMENTS, src_cache=src_cache)
        blocks = src_block_indices, dst_block_indices, dst_block_memory_size
        given = LayerwiseArguments(layer_synchronizer, transfer_configs, *blocks, by_key=False)
        with v1_codes():
            return calls.start_transfer(engine, cache, given, v1_code(LLMStatusCode.LLM_TIMEOUT))
