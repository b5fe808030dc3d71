"""Things whose finalizers give them back: the collector runs those in any thread of the worker, at any moment."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from llm_datadist import CacheDesc, DataType
from llm_datadist.errors import LLMException

if TYPE_CHECKING:
    from faults.campaign.scene import Scene
    from llm_datadist import Cache
    from llm_datadist.cache_manager import CacheManager
    from llm_datadist.types.grant import Grant


class _Litter:
    """A grant and a cache, in a cycle, so that the collector frees them."""

    def __init__(self, cm: CacheManager, grant: Grant, cache: Cache) -> None:
        self._me = self
        self._cm, self._grant, self._cache = cm, grant, cache

    def __del__(self) -> None:
        with suppress(LLMException):  # finalized before
            self._grant.revoke()
            self._cm.deallocate_blocks_cache(self._cache)


def drop(scene: Scene, granted: Cache) -> None:
    """Make a grant of ``granted`` and a cache, and forget them."""
    grant = scene.call("grant", 0.0, granted.grant, [0], 60.0)
    if isinstance(grant, BaseException):
        return
    desc = CacheDesc(1, [1, 64], DataType.DT_INT8)
    cache = scene.call("allocate", scene.budget, scene.cm.allocate_blocks_cache, desc)
    if isinstance(cache, BaseException):
        grant.revoke()
        return
    _Litter(scene.cm, grant, cache)
    scene.journal.note("left to finalizers")
