"""The status codes that v1 has of its own, for what v2 calls otherwise (API §8)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from llm_datadist.errors import KeyInUse, LLMException, LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["v1_code", "v1_codes"]

_V1_CODES: Final = {
    LLMStatusCode.LLM_TIMEOUT: LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
    LLMStatusCode.LLM_OUT_OF_MEMORY: LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
}


def v1_code(code: LLMStatusCode) -> LLMStatusCode:
    """Return what v1 calls ``code``: its own for time-outs and memory, the same for all others."""
    return _V1_CODES.get(code, code)


@contextmanager
def v1_codes() -> Iterator[None]:
    """Give every LLMException of the block its status in v1, a key in use ``LLM_FAILED``; its class stays."""
    try:
        yield
    except LLMException as error:
        in_use = isinstance(error, KeyInUse)
        error.restate(LLMStatusCode.LLM_FAILED if in_use else v1_code(error.status_code))
        raise
