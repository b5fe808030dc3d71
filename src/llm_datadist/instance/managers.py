"""The manager of caches that an LLMDataDist has: one of two, by the mode of its ``init`` (API §3.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.errors import LLMStatusCode, StateError
from llm_datadist.instance.base import EngineOwner, not_initialized

if TYPE_CHECKING:
    from llm_datadist.cache_manager import CacheManager
    from llm_datadist.engine import Engine
    from llm_datadist.kv_cache_manager import KvCacheManager

__all__ = ["Managed"]


class Managed(EngineOwner):
    """cache_manager, kv_cache_manager."""

    _manager: CacheManager | KvCacheManager | None

    def _make_manager(self, engine: Engine) -> CacheManager | KvCacheManager:
        # Late, so that importing the package does not load what only init needs.
        if engine.options.cache_manager:
            from llm_datadist.cache_manager import CacheManager

            return CacheManager(engine)
        from llm_datadist.kv_cache_manager import KvCacheManager

        return KvCacheManager(engine, lambda: self._role)

    @property
    def cache_manager(self) -> CacheManager:
        """The CacheManager (v2 mode); the same object until finalize.

        Raises:
            NotInitialized: Before init or after finalize.
            StateError: In v1 mode (``LLM_PARAM_INVALID``).

        Source: API §3.3.
        """
        from llm_datadist.cache_manager import CacheManager

        manager = self._manager
        if isinstance(manager, CacheManager):
            return manager
        raise _no_such("cache_manager", manager, "1", "kv_cache_manager")

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The KvCacheManager (v1 mode: ``llm.EnableCacheManager`` is not 1); the same object until finalize.

        Raises:
            NotInitialized: Before init or after finalize.
            StateError: In v2 mode (``LLM_PARAM_INVALID``).

        Source: API §3.3.
        """
        from llm_datadist.kv_cache_manager import KvCacheManager

        manager = self._manager
        if isinstance(manager, KvCacheManager):
            return manager
        raise _no_such("kv_cache_manager", manager, "0", "cache_manager")


def _no_such(wanted: str, manager: object, value: str, other: str) -> StateError:
    if manager is None:
        return not_initialized(wanted)
    return StateError(
        f"{wanted}: this LLMDataDist was initialised with the other interface; use {other}, or "
        f"llm.EnableCacheManager={value} (LLMConfig.enable_cache_manager)",
        status_code=LLMStatusCode.LLM_PARAM_INVALID,
    )
