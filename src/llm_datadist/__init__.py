"""open-datadist: LLM KV caches linked, published and moved between prefill and decode processes, on ordinary hosts.

An independent implementation of the LLM-DataDist interface; docs/architecture.md shows how it works.
"""

from __future__ import annotations

from llm_datadist.config import LLMConfig, LlmConfig
from llm_datadist.data_type import DataType
from llm_datadist.datadist import LLMDataDist
from llm_datadist.errors import LLMException, LLMStatusCode, Status
from llm_datadist.tasks import CacheTask
from llm_datadist.types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMRole,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

__all__ = [  # noqa: RUF022 (grouped by what they are for, not by name)
    # one end of the links
    "LLMDataDist",
    "LLMConfig",
    "LlmConfig",
    "LLMClusterInfo",
    "LLMRole",
    # caches and their keys
    "CacheDesc",
    "Cache",
    "CacheKey",
    "BlocksCacheKey",
    "CacheKeyByIdAndIndex",
    "DataType",
    "Placement",
    # memory of the user
    "MemInfo",
    "Memtype",
    "RegisterMemStatus",
    # layer-wise transfer
    "LayerSynchronizer",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "CacheTask",
    # what went wrong
    "LLMException",
    "LLMStatusCode",
    "Status",
]
