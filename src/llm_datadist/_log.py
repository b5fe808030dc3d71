"""The library's logger. Importing it installs no handler; the application, or the command line, decides
(interface R30)."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

logger: Final = logging.getLogger("LLM_DATADIST")

LEVEL_VARIABLE: Final = "ASCEND_GLOBAL_LOG_LEVEL"
#: Ours: it also has the log written to standard error.
LOG_VARIABLE: Final = "LLM_DATADIST_LOG"

_LEVELS: Final = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING, "3": logging.ERROR}
_NAMES: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def named(error: BaseException) -> str:
    """Return what a log line says of an exception: its class and its text."""
    return f"{type(error).__name__}: {error}"


def apply_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Set the logger's level from ``ASCEND_GLOBAL_LOG_LEVEL``; unset or empty leaves the level alone.

    ``LLM_DATADIST_LOG`` counts instead where it is set. It also gives the logger a handler for standard error, which is
    silent once the application has handlers of its own.
    """
    level = _level(environ, LEVEL_VARIABLE, _LEVELS, "0 DEBUG, 1 INFO, 2 WARNING, 3 ERROR")
    if level is not None:
        logger.setLevel(level)
    level = _level(environ, LOG_VARIABLE, _NAMES, "debug, info, warning or error")
    if level is not None:
        logger.setLevel(level)
        logger.addHandler(_stderr())


def _level(environ: Mapping[str, str], variable: str, levels: Mapping[str, int], known: str) -> int | None:
    """Return the level that a variable names; None, with a warning where it names none."""
    value = environ.get(variable, "").strip()
    level = levels.get(value)
    if value and level is None:
        logger.warning("%s=%r ignored: %s", variable, value, known)
    return level


def _stderr() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    return handler


apply_environment()
