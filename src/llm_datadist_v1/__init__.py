"""Another path of the KvCacheManager mode (interface R23)."""

from llm_datadist import KvCache, KvCacheManager, Tensor, TensorDesc

__all__ = ["KvCache", "KvCacheManager", "Tensor", "TensorDesc"]
