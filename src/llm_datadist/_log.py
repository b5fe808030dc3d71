"""Logger of the library (interface R30). It gets a handler only if ``LLM_DATADIST_LOG`` is set."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

logger: Final = logging.getLogger("LLM_DATADIST")
#: Children, whose records reach the handlers of the former: of links and connections, and of calls.
links_logger: Final = logger.getChild("links")
calls_logger: Final = logger.getChild("calls")

LEVEL_VARIABLE: Final = "ASCEND_GLOBAL_LOG_LEVEL"
#: An extension; also writes the log to standard error.
LOG_VARIABLE: Final = "LLM_DATADIST_LOG"

_LEVELS: Final = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING, "3": logging.ERROR}
_NAMES: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def named(error: BaseException) -> str:
    """Return class and text of an exception."""
    return f"{type(error).__name__}: {error}"


class SeldomLog:
    """Log of what a peer can repeat: of each name, of this side, at most one line a second. Threads: any."""

    def __init__(self, to: logging.Logger) -> None:
        self._to = to
        self._lines: dict[str, tuple[float, int]] = {}  # when the next may come, and number left out

    def log(self, level: int, name: str, text: str, error: BaseException | None = None) -> None:
        now, (again, left_out) = time.monotonic(), self._lines.get(name, (0.0, 0))
        if now < again:
            self._lines[name] = again, left_out + 1
            return
        self._lines[name] = now + 1, 0
        self._to.log(level, "%s%s", text, f" ({left_out} more like it)" if left_out else "", exc_info=error)


def apply_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Set the logger's level from ``ASCEND_GLOBAL_LOG_LEVEL``, then from ``LLM_DATADIST_LOG``, if set.

    The latter also adds a handler for standard error, silent while the root logger has handlers.
    """
    level = _level(environ, LEVEL_VARIABLE, _LEVELS, "0 DEBUG, 1 INFO, 2 WARNING, 3 ERROR")
    if level is not None:
        logger.setLevel(level)
    level = _level(environ, LOG_VARIABLE, _NAMES, "debug, info, warning or error")
    if level is not None:
        logger.setLevel(level)
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        logger.addHandler(handler)


def _level(environ: Mapping[str, str], variable: str, levels: Mapping[str, int], known: str) -> int | None:
    """Return the level of a variable; None if unset or, with a warning, unknown."""
    value = environ.get(variable, "").strip()
    level = levels.get(value)
    if value and level is None:
        logger.warning("%s=%r ignored: %s", variable, value, known)
    return level


apply_environment()
