"""Another path of CacheManager (R23)."""

from llm_datadist.cache_manager import CacheManager

__all__ = ["CacheManager"]
