"""Calls that make caches and give them back: from a pool, or over memory of the user (API §6.1 to §6.7, §6.15)."""

from __future__ import annotations

from llm_datadist.cache.layout import CacheKind, Geometry
from llm_datadist.checks import check_int64, check_list, check_rule, check_type
from llm_datadist.errors import NotLinked
from llm_datadist.managers import arguments
from llm_datadist.managers.base import EngineUser, new_handle
from llm_datadist.types import BlocksCacheKey, Cache, CacheDesc, CacheKey, MemInfo

__all__ = ["MemoryCalls"]


class MemoryCalls(EngineUser):
    """Allocate, register, deallocate, unregister, and the keys."""

    # --- memory of the library's pools -----------------------------------------------------------------------------

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: list[CacheKey] | tuple[CacheKey, ...] = ()) -> Cache:
        """Allocate a continuous cache from the pool of its placement. To be deprecated by the interface.

        Key i names batch row i (``shape[0]`` rows). A row without a key gets the placeholder
        ``CacheKey(c, req_id=2**64 - 1)``; trailing ones may be left out (R4). The same key twice: the last row wins
        (R2). The memory goes back to the pool when the cache is deallocated *and* its keys are consumed or removed.

        Args:
            cache_desc: ``num_tensors`` tensors of ``shape``; each is a separate allocation, rounded up to pages.
            cache_keys: At most ``shape[0]`` keys; their cluster id is ignored here.

        Returns:
            The cache; ``tensor_addrs`` has one address per tensor.

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: Impossible shape, more keys than rows, no pool for that placement (R12).
            KeyInUse: A key is bound to another cache (R3).
            OutOfMemory: The pool is exhausted, or peers did not end their writes into memory that was given back
                within ``sync_kv_timeout``; nothing was allocated or bound.

        Source: [seed:deprecated] allocate_cache, API §6.1.
        """
        engine = self._engine
        check_type("cache_desc", cache_desc, CacheDesc)
        check_list("cache_keys", cache_keys, CacheKey, tuple_ok=True)
        geometry = Geometry.of(cache_desc, CacheKind.CACHE)
        arguments.check_key_count(cache_keys, geometry.rows)
        with engine.meters.span("allocate_cache", "%r keys=%s", cache_desc, cache_keys):
            entry = engine.store.allocate(
                geometry, [(key, row) for row, key in enumerate(cache_keys)], self._deadline()
            )
        return new_handle(entry, cache_desc, engine.grants)

    def deallocate_cache(self, cache: Cache) -> None:
        """Give an allocated continuous cache back; ``cache.tensor_addrs`` is emptied. To be deprecated.

        Keys that are bound keep the memory, and peers can still pull by key and by id, until they are consumed or
        removed. Unknown, freed and registered caches: no-op, except that the handle is emptied. A handle of another
        LLMDataDist, or from before ``finalize``: no-op, and a warning.

        Raises:
            TypeError: Not a Cache (``NoneArgument`` for None).
            ParamError: A blocks cache: use :meth:`deallocate_blocks_cache`.

        Source: [seed:deprecated] deallocate_cache, API §6.2.
        """
        engine = self._engine
        check_type("cache", cache, Cache)
        check_rule(not cache.is_blocks_cache, "cache: this is a blocks cache; use deallocate_blocks_cache")
        if not arguments.made_here("deallocate_cache", cache, engine):
            return
        with engine.meters.span("deallocate_cache", "id=%d", cache.cache_id):
            cache._empty()  # first: whoever still finds addresses in the handle finds the cache in the registry
            engine.store.deallocate(cache.cache_id)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key, of a registered cache too (R25); later pulls by it fail. To be deprecated.

        May free a cache that was deallocated and waited for this key. A pull of the key that is running fails.
        Unknown keys and placeholders: no-op.

        Raises:
            TypeError: Not a CacheKey (``NoneArgument`` for None).

        Source: [seed:deprecated] remove_cache_key, API §6.3.
        """
        engine = self._engine
        check_type("cache_key", cache_key, CacheKey)
        with engine.meters.span("remove_cache_key", "%s", cache_key):
            engine.store.remove_key(cache_key)

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> Cache:
        """Allocate a blocks (paged) cache: ``shape[0]`` blocks per tensor. To be deprecated.

        One blocks cache per ``model_id`` and LLMDataDist can carry a key.

        Raises:
            TypeError: Wrong types.
            ParamError: Impossible shape, no pool for that placement (R12).
            KeyInUse: There is a blocks cache of that model.
            OutOfMemory: The pool is exhausted, or peers did not end their writes into memory that was given back
                within ``sync_kv_timeout``; nothing was allocated or bound.

        Source: [seed:deprecated] allocate_blocks_cache, API §6.4.
        """
        engine = self._engine
        check_type("cache_desc", cache_desc, CacheDesc)
        keys = arguments.blocks_keys(blocks_cache_key)
        geometry = Geometry.of(cache_desc, CacheKind.BLOCKS)
        with engine.meters.span("allocate_blocks_cache", "%r key=%s", cache_desc, blocks_cache_key):
            entry = engine.store.allocate(geometry, keys, self._deadline())
        return new_handle(entry, cache_desc, engine.grants)

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Give a blocks cache back with its key, at once (R27); ``cache.tensor_addrs`` is emptied. To be deprecated.

        Pulls of it that are running fail. Unknown, freed and registered caches: no-op, but the handle is emptied. A
        handle of another LLMDataDist: as :meth:`deallocate_cache`.

        Raises:
            TypeError: Not a Cache (``NoneArgument`` for None).
            ParamError: Not a blocks cache.

        Source: [seed:deprecated] deallocate_blocks_cache (its body repeats allocate_cache by a slip), API §6.4.
        """
        engine = self._engine
        check_type("cache", cache, Cache)
        check_rule(cache.is_blocks_cache, "cache: not a blocks cache; use deallocate_cache")
        if not arguments.made_here("deallocate_blocks_cache", cache, engine):
            return
        with engine.meters.span("deallocate_blocks_cache", "id=%d", cache.cache_id):
            cache._empty()  # first, as in deallocate_cache
            engine.store.deallocate(cache.cache_id)

    # --- memory of the user ----------------------------------------------------------------------------------------

    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: list[CacheKey] | tuple[CacheKey, ...] = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Enter memory of yours as a continuous cache, one address per tensor. The memory is not touched.

        Keys bind as in :meth:`allocate_cache`, but one that is bound already keeps its first binding, and pulling
        consumes none of them. May be called before or after linking.

        Args:
            cache_desc: Geometry of each tensor.
            addrs: ``num_tensors`` non-zero addresses. They may lie inside a pool of this library.
            cache_keys: At most ``shape[0]`` keys.
            remote_accessible: None means True; False refuses peers access to this cache and nothing else (R16). True
                itself may be said before ``link()`` only, as documented; leave it out after that.

        Raises:
            TypeError: Wrong types; ``addrs`` must be a list.
            ParamError: Impossible shape, wrong number of addresses, a zero address, more keys than rows;
                ``remote_accessible=True`` after ``link()``.

        Source: API §6.6.
        """
        engine = self._engine
        check_type("cache_desc", cache_desc, CacheDesc)
        addresses = arguments.addresses(addrs)
        check_list("cache_keys", cache_keys, CacheKey, tuple_ok=True)
        accessible = arguments.accessible(remote_accessible, linked=engine.links.communicators.called)
        geometry = Geometry.of(cache_desc, CacheKind.CACHE)
        arguments.check_addresses(addresses, geometry)
        arguments.check_key_count(cache_keys, geometry.rows)
        keys = [(key, row) for row, key in enumerate(cache_keys)]
        with engine.meters.span("register_cache", "%r keys=%s", cache_desc, cache_keys):
            entry = engine.store.register(geometry, addresses, keys, remote_accessible=accessible)
        return new_handle(entry, cache_desc, engine.grants)

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Enter memory of yours as a blocks cache. As :meth:`register_cache`, except that the newest key wins.

        Raises:
            TypeError: Wrong types; ``addrs`` must be a list.
            ParamError: Impossible shape, wrong number of addresses, a zero address; ``remote_accessible=True`` after
                ``link()``.

        Source: API §6.6.
        """
        engine = self._engine
        check_type("cache_desc", cache_desc, CacheDesc)
        addresses = arguments.addresses(addrs)
        keys = arguments.blocks_keys(blocks_cache_key)
        accessible = arguments.accessible(remote_accessible, linked=engine.links.communicators.called)
        geometry = Geometry.of(cache_desc, CacheKind.BLOCKS)
        arguments.check_addresses(addresses, geometry)
        with engine.meters.span("register_blocks_cache", "%r key=%s", cache_desc, blocks_cache_key):
            entry = engine.store.register(geometry, addresses, keys, remote_accessible=accessible)
        return new_handle(entry, cache_desc, engine.grants)

    def unregister_cache(self, cache_id: int) -> None:
        """Drop a registered cache and its keys. Pulls of it that are running fail; unknown ids: no-op.

        When this returns nobody is at the memory any more, and it may be freed: peers that push into it, and calls of
        other threads that use it, are waited for within ``sync_kv_timeout``.

        Raises:
            TypeError: Not an int.
            ParamError: Outside int64.
            DeadlineExceeded: Somebody is still at it; the text says who. The cache stays registered, with its keys.

        Source: API §6.7.
        """
        engine = self._engine
        check_int64("cache_id", cache_id)
        with engine.meters.span("unregister_cache", "id=%d", cache_id):
            engine.store.unregister(cache_id, self._deadline())

    def remap_registered_memory(self, mem_infos: MemInfo | list[MemInfo]) -> None:
        """Check the arguments and do nothing: host memory needs no repair (reserved by the interface).

        Raises:
            ParamError: Not MemInfo or a non-empty list of them, not device memory, zero address or size.
            NotLinked: There is no link.

        Source: API §6.15.
        """
        engine = self._engine
        arguments.check_mem_infos(mem_infos)
        if not engine.links.all():
            raise NotLinked("remap_registered_memory: nothing is linked")
