"""Older import path: statuses (interface R23)."""

from llm_datadist.compat import handle_llm_status, raise_if_false, raise_if_true
from llm_datadist.errors import LLMException, LLMStatusCode, Status, code_2_status

__all__ = [
    "LLMException",
    "LLMStatusCode",
    "Status",
    "code_2_status",
    "handle_llm_status",
    "raise_if_false",
    "raise_if_true",
]
