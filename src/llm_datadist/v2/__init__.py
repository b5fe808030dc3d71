"""Other paths of the CacheManager mode (R23)."""
