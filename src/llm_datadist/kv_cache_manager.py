"""KvCacheManager, the v1 interface to caches (interface §8): other rules and codes over the same calls as
CacheManager."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from llm_datadist._cache.geometry import CacheKind
from llm_datadist._checks import check_int32, check_rule, check_type
from llm_datadist._native import parse_blocks
from llm_datadist._native.signals import public_calls_hold_signals
from llm_datadist._transfer import arguments, calls
from llm_datadist._transfer.arguments import ARGUMENTS, check, layer_selection
from llm_datadist._transfer.calls import EngineUser, LayerwiseArguments, RowCopy, transfer_call
from llm_datadist._transfer.v1 import v1_code, v1_codes
from llm_datadist.errors import LLMStatusCode
from llm_datadist.kv_cache import KvCache, Tensor, TensorDesc, cache_of
from llm_datadist.types import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, LLMRole, Placement
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from llm_datadist._native import BlockList
    from llm_datadist._transfer.arguments import Bindings, Rules
    from llm_datadist._transfer.engine import Engine
    from llm_datadist._transfer.layerwise import CacheTask
    from llm_datadist.types import Cache, LayerSynchronizer, TransferConfig
    from llm_datadist.types.descriptors import BlockNumbers

__all__ = ["KvCacheManager"]


def _device_cache(name: str, value: object) -> Cache:
    """Return the v2 handle behind a KvCache, which must be on the device (interface R16)."""
    cache = cache_of(check_type(name, value, KvCache))
    _require_device(name, cache.cache_desc)
    return cache


def _require_device(name: str, desc: CacheDesc) -> None:
    check_rule(
        desc.placement is Placement.DEVICE, f"{name}: placement is {desc.placement.name}, only DEVICE is possible here"
    )


def _block_list(name: str, value: object) -> BlockList:
    return parse_blocks(name, check_type(name, value, list))


#: v1's differences: a handle is a KvCache, on the device, and block numbers come in lists only.
_ARGUMENTS: Final[Rules] = {
    **ARGUMENTS,
    **dict.fromkeys(("cache", "src_cache", "kv_cache", "decoder_kv_cache", "dst", "src"), _device_cache),
    **dict.fromkeys(("prompt_blocks", "decoder_blocks"), _block_list),
}


@public_calls_hold_signals(allocate_cache="_discard", allocate_blocks_cache="_discard", transfer_cache_async="_stop")
class KvCacheManager(EngineUser):
    """Caches of one LLMDataDist in v1 mode, from ``LLMDataDist.kv_cache_manager``.

    A PROMPT serves: only it binds and removes keys. A DECODER pulls and links. A MIX does neither, but may give a
    blocks cache a key. All caches are on the device.

    "v2" is the call of the same name of :class:`~llm_datadist.cache_manager.CacheManager`: docstrings here say what is
    different.

    Statuses are v1's: ``LLM_WAIT_PROCESS_TIMEOUT`` where v2 has ``LLM_TIMEOUT``, ``LLM_DEVICE_OUT_OF_MEMORY`` where
    it has ``LLM_OUT_OF_MEMORY``, ``LLM_FAILED`` for a key in use; the classes are the same. After ``finalize`` every
    method but ``is_initialized`` raises ``StateError`` with ``LLM_ENGINE_FINALIZED`` (interface R21). An argument of a
    wrong type is a TypeError (``NoneArgument`` for None); a ``KvCache`` of another LLMDataDist, or of an earlier
    ``init``, is a CacheError (``LLM_PARAM_INVALID``).

    Threads: any.

    Source: interface §8.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        # Ids of caches whose handle was dropped. KvCache.__del__ adds them in any thread, under any lock: no lock here.
        self._forgotten: deque[int] = deque()

    def is_initialized(self) -> bool:
        """Return True until ``finalize``.

        Source: interface §8.
        """
        return self._of.alive

    @property
    def _engine(self) -> Engine:
        engine = super()._engine
        while self._forgotten:
            try:
                cache_id = self._forgotten.popleft()
            except IndexError:  # another thread was quicker
                break
            engine.store.deallocate(cache_id)
        return engine

    def _require_role(self, call: str, role: LLMRole) -> None:
        now = self._of.options.role
        check_rule(now is role, f"{call}: only a {role.name} may, and this is a {now.name}")

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: list[CacheKey] | tuple[CacheKey, ...] = ()) -> KvCache:
        """Allocate a continuous cache on the device; key i names batch row i, for a DECODER to pull.

        The memory comes from ``mem_pool_cfg``, else ``ge.flowGraphMemMaxSize`` x ``mem_utilization``, else straight
        from the device (interface R12). It is given back once the cache is deallocated *and* its keys are pulled or
        removed.

        Args:
            cache_desc: ``num_tensors`` tensors of ``shape``; placement DEVICE.
            cache_keys: At most ``shape[0]`` keys; only a PROMPT may give any.

        Raises:
            ParamError: HOST placement, impossible shape, more keys than rows, keys although this is no PROMPT.
            KeyInUse: A key is bound to another cache (``LLM_FAILED``).
            OutOfMemory: ``LLM_DEVICE_OUT_OF_MEMORY``; nothing was allocated or bound.

        Source: interface §8.
        """
        self._engine  # noqa: B018 (a finalized manager raises before anything else)
        _, keys = check(_ARGUMENTS, cache_desc=cache_desc, cache_keys=cache_keys)
        _require_device("cache_desc", cache_desc)
        if keys:
            self._require_role("allocate_cache with cache_keys", LLMRole.PROMPT)
        return self._allocate("allocate_cache", cache_desc, CacheKind.CACHE, keys)

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> KvCache:
        """Allocate a blocks (paged) cache on the device: ``shape[0]`` blocks per tensor. Memory as above.

        Args:
            cache_desc: Placement DEVICE.
            blocks_cache_key: Names the cache for others, one per ``model_id``. A DECODER may give none.

        Raises:
            ParamError: HOST placement, impossible shape, a key although this is a DECODER.
            KeyInUse: There is a blocks cache of that model (``LLM_FAILED``).
            OutOfMemory: ``LLM_DEVICE_OUT_OF_MEMORY``; nothing was allocated or bound.

        Source: interface §8.
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
        """Give a cache back, of either kind; ``per_device_tensor_addrs`` is emptied.

        As v2's ``deallocate_cache`` and ``deallocate_blocks_cache``.

        Raises:
            ParamError: A CPU cache: its memory is yours.

        Source: interface §8.
        """
        engine = self._engine
        (handle,) = check(_ARGUMENTS, cache=cache)
        with v1_codes():
            calls.deallocate(engine, "deallocate_cache", handle)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key; later pulls by it fail. Frees a deallocated cache that waited for it. Only on a PROMPT.

        Unknown keys and placeholders: no-op.

        Raises:
            ParamError: This is no PROMPT.

        Source: interface §8.
        """
        engine = self._engine
        check_type("cache_key", cache_key, CacheKey)
        self._require_role("remove_cache_key", LLMRole.PROMPT)
        with v1_codes(), engine.meters.span("remove_cache_key", "%s", cache_key):
            engine.store.remove_key(cache_key)

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
        """Copy bytes [offset, offset + size) of a batch row to the same place of another, in every tensor.

        Arguments as v2's, but both caches are on the device.

        Raises:
            CacheNotFound: as v2's.
            ParamError: as v2's, and for a CPU cache.
            DeadlineExceeded: ``LLM_WAIT_PROCESS_TIMEOUT``; the addressed bytes are undefined.

        Source: interface §8.
        """
        engine = self._engine
        given = RowCopy(dst, src, dst_batch_index, src_batch_index, offset, size)
        with v1_codes():
            calls.copy_cache(engine, _ARGUMENTS, given, req_id)(engine.deadline())

    def copy_blocks(self, cache: KvCache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks inside one blocks cache: ``{src_block: [dst_block, ...]}``, in the order given (interface R26).

        Raises:
            CacheNotFound: as v2's.
            ParamError: as v2's, and for a CPU cache.
            DeadlineExceeded: ``LLM_WAIT_PROCESS_TIMEOUT``; the addressed blocks are undefined.

        Source: interface §8.
        """
        engine = self._engine
        with v1_codes():
            calls.copy_blocks(engine, _ARGUMENTS, cache, copy_block_info)(engine.deadline())

    def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: dict[int, int]) -> None:
        """Move blocks between device and host memory; ``{src_block: dst_block}``, in the order given.

        As v2's, but the host side is a ``KvCache.create_cpu_cache``, and a row of a continuous cache counts as a block.

        Raises:
            ParamError: Sizes or counts differ, an index outside its cache, not one HOST and one DEVICE, a zero address,
                one without memory for its tensor, or a deallocated cache.
            OutOfMemory: No device memory for the staging buffers (``LLM_DEVICE_OUT_OF_MEMORY``).

        Source: interface §8.
        """
        engine = self._engine
        check_type("src", src, KvCache)
        check_type("dst", dst, KvCache)
        (pairs,) = check(_ARGUMENTS, src_to_dst=src_to_dst)
        with v1_codes():
            calls.swap_blocks(engine, cache_of(src), cache_of(dst), pairs, ("src", "dst"))(engine.deadline())

    def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """Return one tensor of the cache for each device (one here), over the cache's own memory.

        What is written to ``Tensor.numpy()`` is written to the cache; ``DT_BF16`` is converted to float32 there, in
        an array of its own.

        Args:
            cache: Of either kind.
            tensor_index: In [0, num_tensors), int32.

        Raises:
            ParamError: The index is outside, the cache was deallocated, or its elements are text (``DT_STRING``).

        Source: interface §8.
        """
        engine = self._engine
        calls.local_id(engine, "get_cache_tensors", "cache", cache_of(check_type("cache", cache, KvCache)))
        index = check_int32("tensor_index", tensor_index)
        desc = cache.cache_desc
        check_rule(
            0 <= index < desc.num_tensors, f"tensor_index={index}: the cache has {desc.num_tensors} tensors, from 0"
        )
        with v1_codes():
            return [Tensor(tensor_views(cache_of(cache))[index], TensorDesc(desc.data_type, list(desc.shape)))]

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

        As v2's without remote cache access, and with offsets. Neither they nor ``size`` make a pull incomplete
        (interface R5).

        Args:
            cache_key: The PROMPT's row: by key, or by cache id and row.
            kv_cache: Destination.
            size: Bytes per tensor; -1: what the destination's row has after ``dst_cache_offset``.
            src_cache_offset: Bytes into the source's row, in every tensor; None: 0.
            dst_cache_offset: Bytes into the destination's row, in every tensor; None: 0.

        Raises:
            CacheNotFound, NotLinked, TransferFailed, PeerLost: as v2's.
            ParamError: as v2's, and where this is no DECODER.
            DeadlineExceeded: ``LLM_WAIT_PROCESS_TIMEOUT``; the link stays usable.

        Source: interface §8.
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
        call = transfer_call(engine, "pull_cache", "kv_cache", cache, name, layers)
        with v1_codes():
            calls.pull_row(call, row, nbytes, engine.deadline(), src_offset=src_offset, dst_offset=dst_offset)

    def pull_blocks(
        self,
        prompt_cache_key: BlocksCacheKey,
        decoder_kv_cache: KvCache,
        prompt_blocks: list[int],
        decoder_blocks: list[int],
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Pull blocks of a PROMPT's blocks cache: ``prompt_blocks[i]`` to ``decoder_blocks[i]``, in order
        (interface R26).

        Args:
            prompt_cache_key: The PROMPT's cache; its cluster id selects the link. Nothing is consumed.
            decoder_kv_cache: Destination, a blocks cache of this process.
            prompt_blocks: Block numbers at the PROMPT, a list that is not empty.
            decoder_blocks: Block numbers here, as many.

        Raises:
            ParamError, CacheNotFound, NotLinked, DeadlineExceeded, TransferFailed, PeerLost: as
                :meth:`pull_cache`; different block sizes are a ParamError (interface R17).

        Source: interface §8.
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
        call = transfer_call(engine, "pull_blocks", "decoder_kv_cache", cache, name, layers)
        with v1_codes():
            calls.pull_blocks(call, sources, targets, None, engine.deadline(), name="decoder_blocks")

    def transfer_cache_async(
        self,
        src_cache: KvCache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: list[TransferConfig] | tuple[TransferConfig, ...],
        src_block_indices: BlockNumbers | None = None,
        dst_block_indices: BlockNumbers | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Send a cache to addresses of peers layer by layer, from a thread of its own. Only on a PROMPT.

        The DECODER linked, and has told its addresses (``per_device_tensor_addrs``) by other means. Arguments and
        results are those of v2's ``transfer_cache_async`` without remote cache access.

        Returns:
            The task, to wait for and to ask for results; a time-out is ``LLM_WAIT_PROCESS_TIMEOUT``.

        Raises:
            ParamError: This is no PROMPT, or a rule on one argument is broken.
            CacheNotFound: The source is not there any more.

        Source: interface §8, §6.14.
        """
        engine = self._engine
        self._require_role("transfer_cache_async", LLMRole.PROMPT)
        (cache,) = check(_ARGUMENTS, src_cache=src_cache)
        blocks = src_block_indices, dst_block_indices, dst_block_memory_size
        given = LayerwiseArguments(layer_synchronizer, transfer_configs, *blocks, by_key=False)
        with v1_codes():
            return calls.start_transfer(engine, cache, given, v1_code(LLMStatusCode.LLM_TIMEOUT))
