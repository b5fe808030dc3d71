"""Older import path: values of the interface (interface R23)."""

from llm_datadist.compat import check_layer_range as check_layer_range
from llm_datadist.types import (
    BlocksCacheKey as BlocksCacheKey,
    Cache as Cache,
    CacheDesc as CacheDesc,
    CacheKey as CacheKey,
    CacheKeyByIdAndIndex as CacheKeyByIdAndIndex,
    LayerSynchronizer as LayerSynchronizer,
    MemInfo as MemInfo,
    Memtype as Memtype,
    Placement as Placement,
    PushType as PushType,
    RegisterMemStatus as RegisterMemStatus,
    TransferConfig as TransferConfig,
    TransferWithCacheKeyConfig as TransferWithCacheKeyConfig,
)
