"""Older import path: values of the interface (interface R23)."""

from llm_datadist.compat import check_layer_range
from llm_datadist.types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    MemInfo,
    Memtype,
    Placement,
    PushType,
    RegisterMemStatus,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "LayerSynchronizer",
    "MemInfo",
    "Memtype",
    "Placement",
    "PushType",
    "RegisterMemStatus",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "check_layer_range",
]
