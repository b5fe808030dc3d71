"""Spans that count, time and log operations; native code unless INFO is logged or calls are traced."""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import main_thread
from typing import TYPE_CHECKING, Final

from llm_datadist._log import calls_logger as logger
from llm_datadist._native import OperationMeter, Timer
from llm_datadist._native.public_call import for_main_thread, whole
from llm_datadist.errors import LLMStatusCode
from llm_datadist.metrics import DurationStatistics, OperationStatistics

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

#: Modules that log for their callers.
_OWN: Final = ("llm_datadist.", "contextlib")


class Meters:
    """Totals per operation, of one engine. Threads: any, without a lock."""

    def __init__(self) -> None:
        self._meters: dict[str, OperationMeter] = {}

    def span(
        self, name: str, detail: str = "", *args: object, blocks: int | None = None
    ) -> AbstractContextManager[Timer]:
        """Return a context manager that times, counts and logs one operation; its block sets the timer's ``nbytes``,
        and ``transport`` where a transport moves them.

        ``detail`` is a ``%``-format of ``args`` and, if given, ``blocks``, used only for the log.
        """
        if (meter := self._meters.get(name)) is None:
            meter = self._meters.setdefault(name, OperationMeter())
        timer = Timer(meter)
        if not logger.isEnabledFor(logging.INFO):
            return timer
        return _logged(timer, name, detail, args if blocks is None else (*args, blocks))

    def call(self, name: str, peers: Iterable[int | None] = ()) -> CallSpan:
        """Return a context manager for an uncounted call; without tracing it does nothing."""
        return CallSpan()

    def totals(self) -> tuple[OperationStatistics, ...]:
        return tuple(_statistics(name, each) for name, each in sorted(self._meters.copy().items()) if each.count)


def _statistics(name: str, meter: OperationMeter) -> OperationStatistics:
    transports = tuple(
        DurationStatistics(transport, sum(buckets), nbytes, seconds, buckets)
        for transport, nbytes, seconds, buckets in sorted(meter.transports)
    )
    return OperationStatistics(name, meter.count, meter.errors, meter.nbytes, meter.seconds, meter.failures, transports)


@whole  # an interrupt may leave a lock of logging held
def log_for_user(level: int, text: str, *args: object) -> None:
    """Log with the caller's first line outside the library."""
    # Private, as no public name finds a frame. An errand's caller is the main thread.
    frame: FrameType | None
    frame = sys._current_frames().get(main_thread().ident or 0) if for_main_thread() else sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back
    line = ("", 0, "") if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    logger.handle(logger.makeRecord(logger.name, level, *line[:2], text, args, None, line[2]))


@dataclass(slots=True)
class CallSpan(AbstractContextManager["CallSpan"]):
    """CallSpan call. If the call returns a status, it sets that and the error."""

    status: LLMStatusCode = LLMStatusCode.LLM_SUCCESS
    error: BaseException | None = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        pass


@contextmanager
def _logged(timer: Timer, name: str, detail: str, args: tuple[object, ...]) -> Iterator[Timer]:
    """Log begin and end of the operation, with the user's line."""
    log_for_user(logging.INFO, "%s started " + detail, name, *args)
    try:
        with timer:
            yield timer
    except BaseException as error:
        log_for_user(logging.INFO, "%s failed " + detail + ": %s", name, *args, error)
        raise
    text = "%s succeeded " + detail + " (%d bytes, %.6f s)"
    log_for_user(logging.INFO, text, name, *args, timer.nbytes, timer.seconds)
