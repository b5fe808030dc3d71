"""A peer asks the owner of memory to move bytes: the limits of such a request, and its refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist._native.lanes import CHANGED
from llm_datadist._transport.connection import MemoryChanged
from llm_datadist.errors import CacheMismatch, LLMException, LLMStatusCode, TransferFailed, code_2_status

if TYPE_CHECKING:
    from llm_datadist._native import Outcome, Plan

MAX_RUNS: Final = 1 << 15
"""Runs of one request: half of what a meta of 1 MiB has room for."""
ONE_REQUEST_BYTES: Final = 1 << 20
"""Measured: a transfer of fewer bytes gains nothing from a second socket."""


def is_one_request(plan: Plan) -> bool:
    """Return True for a plan that is one request, whatever the number of sockets."""
    return 0 < plan.nbytes <= ONE_REQUEST_BYTES and len(plan.runs) <= MAX_RUNS


def refusal(outcome: Outcome, progress: str, *, untouched: bool) -> LLMException:
    """Return the target's refusal as the exception a caller expects."""
    code = code_2_status(outcome.code)  # the engine's own are small numbers, which no status of the interface is
    text = " ".join(f"{progress}: the peer refused: {outcome.text}".splitlines())
    if not untouched:
        return TransferFailed(f"{text}; the addressed bytes are undefined", phase="copy")
    if outcome.code in (CHANGED, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        return MemoryChanged(text, status_code=code, phase="copy")
    kind = CacheMismatch if code is LLMStatusCode.LLM_PARAM_INVALID else TransferFailed
    return kind(text, status_code=code, phase="copy")
