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

_LEVELS: Final = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING, "3": logging.ERROR}


def apply_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Set the logger's level from ``ASCEND_GLOBAL_LOG_LEVEL``; unset or empty leaves the level alone."""
    value = environ.get(LEVEL_VARIABLE, "").strip()
    if not value:
        return
    level = _LEVELS.get(value)
    if level is None:
        logger.warning("%s=%r ignored: 0 DEBUG, 1 INFO, 2 WARNING, 3 ERROR", LEVEL_VARIABLE, value)
        return
    logger.setLevel(level)


apply_environment()
