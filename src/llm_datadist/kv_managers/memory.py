"""v1: calls that make caches and give them back (API §8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.cache.layout import CacheKind, Geometry
from llm_datadist.checks import check_list, check_rule, check_type
from llm_datadist.kv_cache import KvCache
from llm_datadist.kv_managers.base import KvUser, check_cache, require_device
from llm_datadist.managers import arguments
from llm_datadist.managers.base import new_handle
from llm_datadist.types import BlocksCacheKey, CacheDesc, CacheKey, LLMRole
from llm_datadist.v1codes import v1_codes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KvMemoryCalls"]


class KvMemoryCalls(KvUser):
    """allocate_cache, allocate_blocks_cache, deallocate_cache, remove_cache_key."""

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
