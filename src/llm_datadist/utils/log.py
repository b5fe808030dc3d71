"""Older import path: the logger ``LLM_DATADIST`` (interface R23)."""

from logging import Logger

from llm_datadist._log import logger

__all__ = ["debug", "error", "get_logger", "info", "warn", "warning"]

debug, info, warning, error = logger.debug, logger.info, logger.warning, logger.error
warn = warning
#: (file, line, function, stack) of the code that calls it.
_find_caller = logger.findCaller


def get_logger() -> Logger:
    """Return the library's logger.

    Source: interface §12.
    """
    return logger
