"""KvCacheManager, the v1 interface to caches (API §8): other rules and codes over the same parts as CacheManager."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from llm_datadist._cache.geometry import CacheKind, Geometry
from llm_datadist._checks import (
    check_int32,
    check_int64,
    check_list,
    check_rule,
    check_type,
    check_uint32,
    check_uint64,
)
from llm_datadist._native import parse_blocks
from llm_datadist._transfer import arguments, calls
from llm_datadist._transfer.arguments import layer_selection
from llm_datadist._transfer.calls import EngineUser, TransferCall, new_handle
from llm_datadist.cache_manager import Blocks, CacheManager, start_transfer
from llm_datadist.errors import LLMStatusCode, v1_code, v1_codes
from llm_datadist.kv_cache import KvCache, Tensor, TensorDesc
from llm_datadist.types import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, LLMRole, Placement
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llm_datadist._transfer.engine import Engine
    from llm_datadist._transfer.layerwise import CacheTask
    from llm_datadist.types import LayerSynchronizer, TransferConfig

__all__ = ["KvCacheManager", "check_cache", "require_device"]


class KvCacheManager(EngineUser):
    """Caches of one LLMDataDist in v1 mode, from ``LLMDataDist.kv_cache_manager``. Any thread may call any method.

    A PROMPT serves: it alone binds and removes keys. A DECODER pulls and links. A MIX does neither: each of these
    calls names the one role that may, except that a MIX may give a blocks cache a key. All caches are on the device.
    The calls are documented where they are written: memory (``kv_cache_manager.py``), inside the process
    (``kv_cache_manager.py``), pulls (``kv_cache_manager.py``), transfers layer by layer
    (``kv_cache_manager.py``).

    Statuses are v1's: ``LLM_WAIT_PROCESS_TIMEOUT`` where v2 has ``LLM_TIMEOUT``, ``LLM_DEVICE_OUT_OF_MEMORY`` where
    it has ``LLM_OUT_OF_MEMORY``, ``LLM_FAILED`` for a key in use; the classes are the same. After ``finalize`` every
    method but ``is_initialized`` raises ``StateError`` with ``LLM_ENGINE_FINALIZED`` (R21).

    Source: API §8.
    """

    def is_initialized(self) -> bool:
        """Return True until ``finalize``.

        Source: API §8.
        """
        return self._of.alive

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """Check that exactly one of ``req_id`` and ``prefix_id`` is set (below 2**64 - 1).

        Raises:
            TypeError: Not a CacheKey (``NoneArgument`` for None).
            ParamError: Both, or neither.

        Source: API §8, §6.0.
        """
        arguments.check_single_id(check_type("cache_key", cache_key, CacheKey))

    def __init__(self, engine: Engine, role: Callable[[], LLMRole]) -> None:
        super().__init__(engine)
        self._local = CacheManager(engine)
        self._role = role
        # Filled by KvCache.__del__, anywhere; a deque takes and gives one element without a lock.
        self._forgotten: deque[int] = deque()

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
        now = self._role()
        check_rule(now is role, f"{call}: only a {role.name} may, and this is a {now.name}")

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: list[CacheKey] | tuple[CacheKey, ...] = ()) -> KvCache:
        """Allocate a continuous cache on the device; key i names batch row i, for a DECODER to pull.

        Keys as in :meth:`CacheManager.allocate_cache <llm_datadist.cache_manager.CacheManager>`: placeholders
        ``CacheKey(c, req_id=2**64 - 1)`` bind nothing (R4), of the same key twice the last row wins (R2). The memory
        comes from ``mem_pool_cfg``, else ``ge.flowGraphMemMaxSize`` x ``mem_utilization``, else straight from the
        device (R12). It is given back once the cache is deallocated *and* its keys are pulled or removed.

        Args:
            cache_desc: ``num_tensors`` tensors of ``shape``; placement DEVICE.
            cache_keys: At most ``shape[0]`` keys; only a PROMPT may give any.

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: HOST placement, impossible shape, more keys than rows, keys although this is no PROMPT.
            KeyInUse: A key is bound to another cache (``LLM_FAILED``).
            OutOfMemory: ``LLM_DEVICE_OUT_OF_MEMORY``; nothing was allocated or bound.

        Source: API §8.
        """
        self._engine  # noqa: B018 (a dead manager says so before anything else)
        check_type("cache_desc", cache_desc, CacheDesc)
        check_list("cache_keys", cache_keys, CacheKey, tuple_ok=True)
        require_device("cache_desc", cache_desc)
        if cache_keys:
            self._require_role("allocate_cache with cache_keys", LLMRole.PROMPT)
        geometry = Geometry.of(cache_desc, CacheKind.CACHE)
        arguments.check_key_count(cache_keys, geometry.rows)
        keys = [(key, row) for row, key in enumerate(cache_keys)]
        return self._allocate("allocate_cache", cache_desc, geometry, keys)

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> KvCache:
        """Allocate a blocks (paged) cache on the device: ``shape[0]`` blocks per tensor. Memory as above.

        Args:
            cache_desc: Placement DEVICE.
            blocks_cache_key: Names the cache for others, one per ``model_id``. A DECODER may give none.

        Raises:
            TypeError: Wrong types (``NoneArgument`` for a ``cache_desc`` of None).
            ParamError: HOST placement, impossible shape, a key although this is a DECODER.
            KeyInUse: There is a blocks cache of that model (``LLM_FAILED``).
            OutOfMemory: ``LLM_DEVICE_OUT_OF_MEMORY``; nothing was allocated or bound.

        Source: API §8.
        """
        self._engine  # noqa: B018 (as above)
        check_type("cache_desc", cache_desc, CacheDesc)
        keys = arguments.blocks_keys(blocks_cache_key)
        require_device("cache_desc", cache_desc)
        check_rule(
            not keys or self._role() is not LLMRole.DECODER,
            "blocks_cache_key: a DECODER's caches are not pulled, so they have no key; leave it out",
        )
        geometry = Geometry.of(cache_desc, CacheKind.BLOCKS)
        return self._allocate("allocate_blocks_cache", cache_desc, geometry, keys)

    def _allocate(
        self,
        call: str,
        cache_desc: CacheDesc,
        geometry: Geometry,
        keys: Sequence[tuple[CacheKey | BlocksCacheKey, int]],
    ) -> KvCache:
        engine = self._engine
        with v1_codes(), engine.meters.span(call, "%r keys=%s", cache_desc, keys):
            entry = engine.store.allocate(geometry, keys, self._deadline())
        return KvCache(new_handle(entry, cache_desc, engine.grants), self._forgotten)

    def deallocate_cache(self, cache: KvCache) -> None:
        """Give a cache back, of either kind; ``per_device_tensor_addrs`` is emptied.

        A continuous cache is freed once its keys are pulled or removed too, a blocks cache at once with its key.
        Unknown and freed caches: no-op. A handle of another LLMDataDist, or from before ``finalize``: no-op, and a
        warning.

        Raises:
            TypeError: Not a KvCache (``NoneArgument`` for None).
            ParamError: A CPU cache: its memory is yours.

        Source: API §8.
        """
        engine = self._engine
        check_cache("cache", cache)
        if not arguments.made_here("deallocate_cache", cache._cache, engine):
            return
        with v1_codes(), engine.meters.span("deallocate_cache", "id=%d", cache.cache_id):
            cache._cache._empty()  # first: whoever still finds addresses in the handle finds the cache in the registry
            engine.store.deallocate(cache.cache_id)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key; later pulls by it fail. Frees a deallocated cache that waited for it. Only on a PROMPT.

        Unknown keys and placeholders: no-op.

        Raises:
            TypeError: Not a CacheKey (``NoneArgument`` for None).
            ParamError: This is no PROMPT.

        Source: API §8.
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

        As v2's (R8), between two caches on the device.

        Args:
            dst: Destination, a continuous cache.
            src: Source, a continuous cache.
            dst_batch_index: Row of the destination.
            src_batch_index: Row of the source.
            offset: Bytes into the row.
            size: Bytes per tensor, or -1: to the end of the row.
            req_id: Shown as ``req_id=N`` in every log record and error of this call (R9).

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: A CPU or blocks cache, an index or range outside a row, descriptors that do not match.
            CacheNotFound: A cache is not there any more.
            DeadlineExceeded: Longer than ``sync_kv_timeout`` (``LLM_WAIT_PROCESS_TIMEOUT``); the addressed bytes are
                undefined.

        Source: [seed:copy_cache], API §8.
        """
        self._engine  # noqa: B018 (a dead manager says so before anything else)
        with v1_codes():
            with arguments.naming_request(req_id):
                target, source = check_cache("dst", dst)._cache, check_cache("src", src)._cache
            self._local.copy_cache(target, source, dst_batch_index, src_batch_index, offset, size, req_id)

    def copy_blocks(self, cache: KvCache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks inside one blocks cache: ``{src_block: [dst_block, ...]}``, in the order given (R26).

        Raises:
            TypeError: Wrong types; the values must be lists of int (``NoneArgument`` for None).
            ParamError: Not a blocks cache on the device, an index outside it or negative.
            CacheNotFound: The cache is not there any more.
            DeadlineExceeded: Longer than ``sync_kv_timeout`` (``LLM_WAIT_PROCESS_TIMEOUT``); the addressed blocks are
                undefined.

        Source: [seed:deprecated] copy_blocks, API §8.
        """
        self._engine  # noqa: B018 (as above)
        with v1_codes():
            self._local.copy_blocks(check_cache("cache", cache)._cache, copy_block_info)

    def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: dict[int, int]) -> None:
        """Move blocks between device and host memory; ``{src_block: dst_block}``, in the order given.

        The host side is a ``KvCache.create_cpu_cache``. Block sizes and ``num_tensors`` must be equal, block counts
        may differ; a row of a continuous cache counts as a block. Threads and staging buffers as v2's (R10).

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: Sizes or counts differ, an index outside its cache, not one HOST and one DEVICE, a zero address,
                or a deallocated cache.
            OutOfMemory: No device memory for the staging buffers (``LLM_DEVICE_OUT_OF_MEMORY``).

        Source: [seed:swap_blocks], API §8.
        """
        engine = self._engine
        check_type("src", src, KvCache)
        check_type("dst", dst, KvCache)
        src_blocks, dst_blocks = arguments.swap_pairs(src_to_dst)
        ids = (src.cache_id, dst.cache_id, len(src_to_dst))
        with v1_codes(), engine.meters.span("swap_blocks", "src=%d dst=%d %d blocks", *ids) as span:
            both = (src._cache, dst._cache)
            span.nbytes = engine.local.swap_blocks(*both, src_blocks, dst_blocks, ends=("src", "dst"))

    def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """Return one tensor of the cache for each device (one here), over the cache's own memory.

        What is written to ``Tensor.numpy()`` is written to the cache; ``DT_BF16`` is converted to float32 there, in
        an array of its own.

        Args:
            cache: Of either kind.
            tensor_index: In [0, num_tensors), int32.

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: The index is outside, the cache was deallocated, or its elements are text (``DT_STRING``).

        Source: API §8.
        """
        self._engine  # noqa: B018 (as above)
        check_type("cache", cache, KvCache)
        index = check_int32("tensor_index", tensor_index)
        desc = cache.cache_desc
        check_rule(
            0 <= index < desc.num_tensors, f"tensor_index={index}: the cache has {desc.num_tensors} tensors, from 0"
        )
        with v1_codes():
            return [Tensor(tensor_views(cache._cache)[index], TensorDesc(desc.data_type, list(desc.shape)))]

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

        A complete pull consumes the key at the PROMPT, unless it is a prefix key; layer ranges are complete when
        their union is, offsets and ``size`` make no pull incomplete (R5).

        Args:
            cache_key: The PROMPT's row: by key, or by cache id and row. Its cluster id selects the link.
            kv_cache: Destination, a continuous cache of this process.
            batch_index: Row of the destination.
            size: Bytes per tensor; -1: what the destination's row has after ``dst_cache_offset``.
            src_layer_range: Layers of the source; None or empty: all.
            dst_layer_range: Layers of the destination; None or empty: all. Lengths must be equal.
            src_cache_offset: Bytes into the source's row, in every tensor; None: 0.
            dst_cache_offset: Bytes into the destination's row, in every tensor; None: 0.
            tensor_num_per_layer: Tensors per layer; must divide ``num_tensors`` when a range is given (R14).

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: This is no DECODER, a rule on one argument is broken, or the two caches do not fit each other.
            CacheNotFound: No such cache here, or no such key, id or row at the PROMPT.
            NotLinked: No link to the key's cluster.
            DeadlineExceeded: Longer than ``sync_kv_timeout`` (``LLM_WAIT_PROCESS_TIMEOUT``); the link stays usable.
            TransferFailed: The source changed during the pull; the addressed bytes are undefined.
            PeerLost: The peer died; link again.

        Source: API §8.
        """
        engine = self._engine
        self._require_role("pull_cache", LLMRole.DECODER)
        check_type("cache_key", cache_key, (CacheKey, CacheKeyByIdAndIndex))
        cache = check_cache("kv_cache", kv_cache)._cache
        check_uint32("batch_index", batch_index)
        check_int64("size", size)
        check_rule(not cache.is_blocks_cache, "kv_cache: a blocks cache; use pull_blocks")
        wanted = arguments.byte_count(size)
        src_offset = 0 if src_cache_offset is None else check_uint64("src_cache_offset", src_cache_offset)
        dst_offset = 0 if dst_cache_offset is None else check_uint64("dst_cache_offset", dst_cache_offset)
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer)
        arguments.check_single_id(cache_key)
        name = arguments.remote_name(cache_key, None)
        move = TransferCall(engine, "pull_cache", "kv_cache", cache.cache_id, name, layers, self._deadline())
        with v1_codes():
            calls.pull_row(move, batch_index, wanted, src_offset=src_offset, dst_offset=dst_offset)

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
        """Pull blocks of a PROMPT's blocks cache: ``prompt_blocks[i]`` to ``decoder_blocks[i]``, in order (R26).

        Args:
            prompt_cache_key: The PROMPT's cache; its cluster id selects the link. Nothing is consumed.
            decoder_kv_cache: Destination, a blocks cache of this process.
            prompt_blocks: Block numbers at the PROMPT, a list that is not empty.
            decoder_blocks: Block numbers here, as many.
            src_layer_range: Layers of the source; None or empty: all.
            dst_layer_range: Layers of the destination; None or empty: all.
            tensor_num_per_layer: Tensors per layer (R14).

        Raises:
            TypeError, ParamError, CacheNotFound, NotLinked, DeadlineExceeded, TransferFailed, PeerLost: as
                :meth:`pull_cache`; different block sizes are a ParamError (R17).

        Source: API §8.
        """
        engine = self._engine
        self._require_role("pull_blocks", LLMRole.DECODER)
        check_type("prompt_cache_key", prompt_cache_key, BlocksCacheKey)
        cache = check_cache("decoder_kv_cache", decoder_kv_cache)._cache
        sources = parse_blocks("prompt_blocks", check_type("prompt_blocks", prompt_blocks, list))
        targets = parse_blocks("decoder_blocks", check_type("decoder_blocks", decoder_blocks, list))
        check_rule(len(sources), "prompt_blocks is empty: at least one block is needed")
        arguments.equal_lengths(sources, targets, ("prompt_blocks", "decoder_blocks"))
        check_rule(cache.is_blocks_cache, "decoder_kv_cache: not a blocks cache; use pull_cache")
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer)
        name = arguments.remote_name(prompt_cache_key, None)
        move = TransferCall(engine, "pull_blocks", "decoder_kv_cache", cache.cache_id, name, layers, self._deadline())
        with v1_codes():
            calls.pull_blocks(move, sources, targets, name="decoder_blocks")

    def transfer_cache_async(
        self,
        src_cache: KvCache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: list[TransferConfig] | tuple[TransferConfig, ...],
        src_block_indices: list[int] | tuple[int, ...] | None = None,
        dst_block_indices: list[int] | tuple[int, ...] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Send a cache to addresses of peers layer by layer, from a thread of its own. Only on a PROMPT.

        The DECODER linked, and has told its addresses (``per_device_tensor_addrs``) by other means. The data shapes,
        the synchronizer and the results are those of v2's ``transfer_cache_async`` without remote cache access.

        Args:
            src_cache: Source, on the device, with an even number of tensors.
            layer_synchronizer: Says when a layer is ready; called in the thread of the transfer.
            transfer_configs: :class:`TransferConfig` only.
            src_block_indices: Blocks here, or None.
            dst_block_indices: Blocks at the peer, or None.
            dst_block_memory_size: Bytes of a destination block.

        Returns:
            The task, to wait for and to ask for results; a time-out is ``LLM_WAIT_PROCESS_TIMEOUT``.

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: This is no PROMPT, or a rule on one argument is broken.
            CacheNotFound: The source is not there any more.

        Source: API §8, §6.14.
        """
        engine = self._engine
        self._require_role("transfer_cache_async", LLMRole.PROMPT)
        cache = check_cache("src_cache", src_cache)
        blocks = Blocks(src_block_indices, dst_block_indices, dst_block_memory_size)
        waited = v1_code(LLMStatusCode.LLM_TIMEOUT)
        with v1_codes():
            return start_transfer(
                engine,
                cache.cache_id,
                layer_synchronizer,
                transfer_configs,
                blocks,
                by_key=False,
                timeout_code=waited,
            )


def check_cache(name: str, cache: object) -> KvCache:
    """Return ``cache`` if it is a KvCache on the device: v1 has no other calls for caches (R16)."""
    found = check_type(name, cache, KvCache)
    require_device(name, found.cache_desc)
    return found


def require_device(name: str, desc: CacheDesc) -> None:
    """Raise ParamError unless the placement is DEVICE."""
    check_rule(
        desc.placement is Placement.DEVICE, f"{name}: placement is {desc.placement.name}, only DEVICE is possible here"
    )
