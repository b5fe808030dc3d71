"""CacheManager, the v2 interface to caches (API §6): checks arguments, then hands over to the engine's parts.

Every method checks everything that can be known without the peer first, in the documented order; when a check fails
nothing has happened. ``TypeError``, ``NoneArgument`` and ``ParamError`` are raised before, everything else after.
"""

from __future__ import annotations

from llm_datadist.checks import check_type
from llm_datadist.managers import arguments
from llm_datadist.managers.asynchronous import AwaitedCalls
from llm_datadist.managers.layerwise import LayerwiseCalls
from llm_datadist.managers.memory import MemoryCalls
from llm_datadist.types import CacheKey

__all__ = ["CacheManager"]


class CacheManager(MemoryCalls, AwaitedCalls, LayerwiseCalls):
    """Caches of one LLMDataDist, from ``LLMDataDist.cache_manager``. Any thread may call any method.

    The calls are documented where they are written: memory (``managers/memory.py``), copies inside the process
    (``managers/local.py``), transfers (``managers/remote.py``), layer-wise ones (``managers/layerwise.py``), and for
    asyncio (``managers/asynchronous.py``). After ``finalize`` every method raises ``StateError`` with
    ``LLM_ENGINE_FINALIZED`` (R21), also when the LLMDataDist has been initialised again: that made a new manager.

    Source: API §6.0.
    """

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """Check that exactly one of ``req_id`` and ``prefix_id`` is set (below 2**64 - 1).

        Raises:
            ParamError: Both, or neither.

        Source: API §6.0.
        """
        arguments.check_single_id(check_type("cache_key", cache_key, CacheKey))
