"""Other paths of the CacheManager mode (interface R23)."""
