"""What every group of calls shares: the engine, which may be dead, and the deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llm_datadist.cache.layout import CacheKind
from llm_datadist.deadline import Deadline
from llm_datadist.errors import LLMStatusCode, StateError
from llm_datadist.types import Cache

if TYPE_CHECKING:
    from llm_datadist.cache.entries import Entry
    from llm_datadist.engine import Engine
    from llm_datadist.grant import Granter
    from llm_datadist.types import CacheDesc

__all__ = ["EngineUser", "Pending", "new_handle"]

#: A call whose arguments have been checked: what is left to do, within a deadline, in whichever thread.
Pending = Callable[[Deadline], None]


class EngineUser:
    """Holds the engine of one ``init``. Any thread."""

    def __init__(self, engine: Engine) -> None:
        self._of = engine

    @property
    def _engine(self) -> Engine:
        if not self._of.alive:
            raise StateError(
                f"this {type(self).__name__} belongs to a finalized LLMDataDist; take a new one after init",
                status_code=LLMStatusCode.LLM_ENGINE_FINALIZED,
            )
        return self._of

    def _deadline(self) -> Deadline:
        return Deadline(self._of.options.sync_kv_timeout_ms)


def new_handle(entry: Entry, cache_desc: CacheDesc, granter: Granter) -> Cache:
    """Return the handle of a cache that was just made."""
    storage = entry.storage
    return Cache(
        entry.cache_id,
        cache_desc,
        storage.tensors.bases.tolist(),
        entry.geometry.kind is CacheKind.BLOCKS,
        memory=storage,
        granter=granter,
    )
