"""Older import path: small helpers (interface R23)."""

from llm_datadist.compat import layer_range_to_tensor_indices
from llm_datadist.config import parse_listen_ip_info

__all__ = ["layer_range_to_tensor_indices", "parse_listen_ip_info"]
