"""Layer 7, v1: the calls of KvCacheManager, one file per kind of call, over the same parts of the engine as v2's."""
