"""Status codes of v1 mode that differ from those of v2 (interface §8)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from llm_datadist.errors import KeyInUse, LLMException, LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Iterator

_CODES: Final = {
    LLMStatusCode.LLM_TIMEOUT: LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
    LLMStatusCode.LLM_OUT_OF_MEMORY: LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
}


def v1_code(code: LLMStatusCode) -> LLMStatusCode:
    """Return what v1 calls ``code``: its own for time-outs and memory, the same for all others."""
    return _CODES.get(code, code)


@contextmanager
def v1_codes() -> Iterator[None]:
    """Give every LLMException of the block its status in v1; its class stays."""
    try:
        yield
    except LLMException as error:
        in_use = isinstance(error, KeyInUse)
        error.restate(LLMStatusCode.LLM_FAILED if in_use else v1_code(error.status_code))
        raise
