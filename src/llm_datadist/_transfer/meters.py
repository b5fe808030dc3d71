"""Spans that count, time and log operations; native code unless INFO is logged or calls are traced."""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_datadist._log import logger
from llm_datadist._native import OperationMeter, Timer
from llm_datadist.errors import LLMStatusCode
from llm_datadist.metrics import DurationStatistics, OperationStatistics

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


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

    def call(self, name: str, peers: Iterable[int | None] = ()) -> Uncounted:
        """Return a context manager for an uncounted call; without tracing it does nothing."""
        return Uncounted()

    def totals(self) -> tuple[OperationStatistics, ...]:
        return tuple(_statistics(name, each) for name, each in sorted(self._meters.copy().items()) if each.count)


def _statistics(name: str, meter: OperationMeter) -> OperationStatistics:
    transports = tuple(
        DurationStatistics(transport, sum(buckets), nbytes, seconds, buckets)
        for transport, nbytes, seconds, buckets in sorted(meter.transports)
    )
    return OperationStatistics(name, meter.count, meter.errors, meter.nbytes, meter.seconds, meter.failures, transports)


def _user_level() -> int:
    """Return the ``stacklevel`` of the first frame outside the library, for a log call of the calling function."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001 (no public name)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("llm_datadist.", "contextlib")):
        frame, level = frame.f_back, level + 1
    return level


@dataclass(slots=True)
class Uncounted(AbstractContextManager["Uncounted"]):
    """Uncounted call. If the call returns a status, it sets that and the error."""

    status: LLMStatusCode = LLMStatusCode.LLM_SUCCESS
    error: BaseException | None = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        pass


@contextmanager
def _logged(timer: Timer, name: str, detail: str, args: tuple[object, ...]) -> Iterator[Timer]:
    """Log begin and end of the operation, with the user's line."""
    logger.info("%s started " + detail, name, *args, stacklevel=_user_level())
    try:
        with timer:
            yield timer
    except BaseException as error:
        logger.info("%s failed " + detail + ": %s", name, *args, error, stacklevel=_user_level())
        raise
    text = "%s succeeded " + detail + " (%d bytes, %.6f s)"
    logger.info(text, name, *args, timer.nbytes, timer.seconds, stacklevel=_user_level())
