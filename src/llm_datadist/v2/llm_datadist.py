"""Older import path: LLMDataDist (interface R23)."""

from llm_datadist.datadist import LLMDataDist, _shutdown_handler

__all__ = ["LLMDataDist", "_shutdown_handler"]
