"""KvCacheManager, the v1 interface to caches (API §8): other rules and codes over the same parts as CacheManager."""

from __future__ import annotations

from llm_datadist.checks import check_type
from llm_datadist.kv_managers.layerwise import KvLayerwiseCalls
from llm_datadist.kv_managers.local import KvLocalCalls
from llm_datadist.kv_managers.memory import KvMemoryCalls
from llm_datadist.kv_managers.remote import KvRemoteCalls
from llm_datadist.managers import arguments
from llm_datadist.types import CacheKey

__all__ = ["KvCacheManager"]


class KvCacheManager(KvMemoryCalls, KvLocalCalls, KvRemoteCalls, KvLayerwiseCalls):
    """Caches of one LLMDataDist in v1 mode, from ``LLMDataDist.kv_cache_manager``. Any thread may call any method.

    A PROMPT serves: it alone binds and removes keys. A DECODER pulls and links. A MIX does neither: each of these
    calls names the one role that may, except that a MIX may give a blocks cache a key. All caches are on the device.
    The calls are documented where they are written: memory (``kv_managers/memory.py``), inside the process
    (``kv_managers/local.py``), pulls (``kv_managers/remote.py``), transfers layer by layer
    (``kv_managers/layerwise.py``).

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
