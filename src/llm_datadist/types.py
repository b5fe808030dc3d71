"""The values of the interface: enumerations, descriptors, keys, cluster and transfer arguments, in one import."""

from __future__ import annotations

from llm_datadist.cluster import LLMClusterInfo
from llm_datadist.data_type import DataType
from llm_datadist.descriptors import Cache, CacheDesc
from llm_datadist.enums import LLMRole, Memtype, Placement, PushType, RegisterMemStatus
from llm_datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.transfer_types import LayerSynchronizer, MemInfo, TransferConfig, TransferWithCacheKeyConfig

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "DataType",
    "LLMClusterInfo",
    "LLMRole",
    "LayerSynchronizer",
    "MemInfo",
    "Memtype",
    "Placement",
    "PushType",
    "RegisterMemStatus",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
]
