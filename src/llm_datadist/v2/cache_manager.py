"""Older import path: CacheManager (interface R23)."""

from llm_datadist.cache_manager import CacheManager

__all__ = ["CacheManager"]
