"""Values of the interface: enumerations, descriptors, keys, cluster and transfer arguments."""

from llm_datadist.types.cluster import LLMClusterInfo
from llm_datadist.types.data_type import DataType
from llm_datadist.types.descriptors import Cache, CacheDesc
from llm_datadist.types.enums import LLMRole, Memtype, Placement, PushType, RegisterMemStatus
from llm_datadist.types.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.types.layerwise import LayerSynchronizer, MemInfo, TransferConfig, TransferWithCacheKeyConfig

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
