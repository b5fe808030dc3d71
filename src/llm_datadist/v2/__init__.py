"""Older import paths: CacheManager mode (interface R23)."""
