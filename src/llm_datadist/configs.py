"""Older import path: configuration (interface R23)."""

from llm_datadist.config import LLMConfig, LlmConfig
from llm_datadist.types.cluster import LLMClusterInfo, trans_str_ip
from llm_datadist.types.enums import LLMRole

__all__ = ["LLMClusterInfo", "LLMConfig", "LLMRole", "LlmConfig", "trans_str_ip"]
