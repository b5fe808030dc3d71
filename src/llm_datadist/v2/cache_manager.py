"""Another path of CacheManager (interface R23)."""

from llm_datadist.cache_manager import CacheManager

__all__ = ["CacheManager"]
