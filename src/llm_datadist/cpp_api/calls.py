"""What every call of the C++-shaped interface shares: a status instead of an exception, and the reason kept."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from llm_datadist._deadline import Deadline
from llm_datadist._log import logger
from llm_datadist.errors import LLMException, LLMStatusCode, NotInitialized

if TYPE_CHECKING:
    from types import TracebackType

    from llm_datadist._transfer.engine import Engine
    from llm_datadist.datadist import LLMDataDist

__all__ = ["Call", "StatusCalls", "deadline_of"]

#: What the operating system refuses is a status too.
_FAILURES = (LLMException, OSError, MemoryError)


class StatusCalls:
    """Holds the LLMDataDist that does the work. Any thread, except that Finalize must be alone (API §11)."""

    def __init__(self) -> None:
        self._dist: LLMDataDist | None = None
        self._errors = threading.local()

    @property
    def last_error(self) -> Exception | None:
        """Why the last call of this thread that did not succeed did not; None if all did. An extension."""
        error: Exception | None = getattr(self._errors, "last", None)
        return error

    @property
    def datadist(self) -> LLMDataDist:
        """The LLMDataDist underneath: ``statistics``, ``explain``, ``listen_port``, ``check_integrity``. An extension.

        Raises:
            NotInitialized: Before the first Initialize.
        """
        if self._dist is None:
            raise _not_initialized("datadist")
        return self._dist

    def _initialized(self, what: str) -> LLMDataDist:
        if self._dist is None or self._dist._engine is None:
            raise _not_initialized(what)
        return self._dist

    def _engine(self, what: str) -> Engine:
        dist = self._dist
        engine = None if dist is None else dist._engine
        if engine is None:
            raise _not_initialized(what)
        return engine

    def _failed(self, what: str, status: LLMStatusCode, error: Exception) -> None:
        logger.warning("%s returns %s: %s", what, status, " ".join(str(error).splitlines()), stacklevel=4)
        # Kept for long, perhaps: without the frames, which hold caches and links.
        each: BaseException | None = error
        while each is not None:
            each.__traceback__ = None
            each = each.__cause__ or each.__context__
        self._errors.last = error


class Call:
    """One call while it runs: what it raises becomes ``status``, but for TypeError. Used by one thread."""

    __slots__ = ("_owner", "_what", "status")

    def __init__(self, owner: StatusCalls, what: str) -> None:
        self._owner = owner
        self._what = what
        self.status = LLMStatusCode.LLM_SUCCESS

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # None where it is not allowed is an LLMException and a TypeError (R1); here it is the latter.
        if not isinstance(error, _FAILURES) or isinstance(error, TypeError):
            return False
        status = error.status_code if isinstance(error, LLMException) else LLMStatusCode.LLM_FAILED
        self.status = status or LLMStatusCode.LLM_FAILED
        self._owner._failed(self._what, self.status, error)
        return True


def deadline_of(engine: Engine) -> Deadline:
    """Return the deadline of an operation that begins now."""
    return Deadline(engine.options.sync_kv_timeout_ms)


def _not_initialized(what: str) -> NotInitialized:
    return NotInitialized(f"{what}: this LlmDataDist is not initialised; call Initialize first")
