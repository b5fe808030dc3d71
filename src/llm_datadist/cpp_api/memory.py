"""Calls of the C++-shaped interface that make caches and give them back (API §9)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from llm_datadist._checks import check_int64, check_type
from llm_datadist._transfer.arguments import addresses, check_addresses
from llm_datadist.cpp_api import arguments
from llm_datadist.cpp_api.calls import Call, StatusCalls, deadline_of
from llm_datadist.cpp_api.structs import Cache, CacheDesc, RegisterCfg, _Mapped

if TYPE_CHECKING:
    from llm_datadist.errors import LLMStatusCode

__all__ = ["CacheCalls"]

_NO_CFG: Final = RegisterCfg()


class CacheCalls(StatusCalls):
    """RegisterKvCache, UnregisterKvCache, AllocateCache, DeallocateCache. Ids count from 1 after Initialize."""

    def RegisterKvCache(
        self, cache_desc: CacheDesc, addrs: list[int], cfg: RegisterCfg = _NO_CFG
    ) -> tuple[LLMStatusCode, int | None]:
        """Register memory of yours as a cache that peers may read and write, by batch row and by block.

        The memory is not touched. It must stay as it is until UnregisterKvCache or Finalize has returned.

        Args:
            cache_desc: ``num_tensors`` tensors of ``shape``.
            addrs: The address of each, uint64, not zero.
            cfg: Reserved.

        Returns:
            ``(LLM_SUCCESS, cache_id)``; ``(LLM_PARAM_INVALID, None)``: an impossible descriptor, no address, another
            number of them than tensors, a zero address.

        Raises:
            TypeError: Wrong types.

        Source: API §9, §6.6.
        """
        cache_id: int | None = None
        with Call(self, "RegisterKvCache") as call:
            engine = self._engine("RegisterKvCache")
            geometry = arguments.geometry("cache_desc", cache_desc)
            bases = addresses(addrs)
            check_type("cfg", cfg, RegisterCfg)
            check_addresses(bases, geometry)
            with engine.meters.span("RegisterKvCache", "%r", cache_desc):
                cache_id = engine.store.register(geometry, bases, [], remote_accessible=True).cache_id
        return call.status, cache_id

    def UnregisterKvCache(self, cache_id: int) -> LLMStatusCode:
        """Drop a registered cache; an unknown id is a success.

        When this returns ``LLM_SUCCESS`` nobody is at the memory any more: peers that write it are waited for.

        Returns:
            ``LLM_PARAM_INVALID``: an id outside int64. ``LLM_TIMEOUT``: somebody is still at the memory; the cache
            stays registered.

        Raises:
            TypeError: Not an int.

        Source: API §9, §6.7.
        """
        with Call(self, "UnregisterKvCache") as call:
            engine = self._engine("UnregisterKvCache")
            check_int64("cache_id", cache_id)
            with engine.meters.span("UnregisterKvCache", "id=%d", cache_id):
                engine.store.unregister(cache_id, deadline_of(engine))
        return call.status

    def AllocateCache(self, cache_desc: CacheDesc) -> tuple[LLMStatusCode, Cache | None]:
        """Allocate a cache from the pool of its placement (``llm.MemPoolConfig``, ``llm.HostMemPoolConfig``).

        It serves as a registered one does. Pool memory is what peers on the same host reach fastest.

        Returns:
            ``(LLM_SUCCESS, cache)`` with id and addresses, which stay mapped for as long as the struct lives;
            ``(LLM_PARAM_INVALID, None)``: an impossible descriptor, or no pool for that placement (R12);
            ``(LLM_OUT_OF_MEMORY, None)``: the pool is exhausted; nothing was allocated.

        Raises:
            TypeError: Not a CacheDesc.

        Source: API §9, §6.1.
        """
        cache: Cache | None = None
        with Call(self, "AllocateCache") as call:
            engine = self._engine("AllocateCache")
            geometry = arguments.geometry("cache_desc", cache_desc)
            with engine.meters.span("AllocateCache", "%r", cache_desc):
                entry = engine.store.allocate(geometry, [], deadline_of(engine))
            desc = replace(cache_desc, shape=list(cache_desc.shape))
            cache = Cache(entry.cache_id, entry.storage.tensors.bases.tolist(), desc)
            # C++ would let the addresses dangle after Finalize; Python should not crash.
            cache._memory = _Mapped(tuple(segment.view() for segment in entry.storage.segments))
        return call.status, cache

    def DeallocateCache(self, cache_id: int) -> LLMStatusCode:
        """Give an allocated cache back; unknown, freed and registered ids are a success, and nothing happens.

        Peers that read it fail. The memory is used again only when no peer writes it any more.

        Returns:
            ``LLM_PARAM_INVALID``: an id outside int64.

        Raises:
            TypeError: Not an int.

        Source: API §9, §6.2.
        """
        with Call(self, "DeallocateCache") as call:
            engine = self._engine("DeallocateCache")
            check_int64("cache_id", cache_id)
            with engine.meters.span("DeallocateCache", "id=%d", cache_id):
                engine.store.deallocate(cache_id)
        return call.status
