"""What every group of calls of LLMDataDist shares: the engine, which is there between init and finalize."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.errors import NotInitialized

if TYPE_CHECKING:
    import threading

    from llm_datadist.engine import Engine
    from llm_datadist.types import LLMRole

__all__ = ["EngineOwner", "not_initialized"]


class EngineOwner:
    """Has an engine, or none: before ``init`` and after ``finalize``. Any thread."""

    _role: LLMRole
    _cluster_id: int
    _engine: Engine | None
    #: Held while the engine is made, taken down, or takes another role.
    _lifecycle: threading.Lock

    def _require_engine(self, what: str) -> Engine:
        engine = self._engine
        if engine is None:
            raise not_initialized(what)
        return engine


def not_initialized(what: str) -> NotInitialized:
    """Return the error of a call that needs ``init`` first."""
    return NotInitialized(f"{what}: this LLMDataDist is not initialized; call init first")
