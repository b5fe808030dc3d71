"""What every group of calls shares: the engine, which may be dead, and the deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llm_datadist.deadline import Deadline
from llm_datadist.errors import LLMStatusCode, StateError

if TYPE_CHECKING:
    from llm_datadist.engine import Engine

__all__ = ["EngineUser", "Pending"]

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
