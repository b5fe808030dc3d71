"""open-datadist: LLM KV caches linked, published and moved between prefill and decode processes, on ordinary hosts.

An independent implementation of the LLM-DataDist interface; docs/architecture.md shows how it works.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from llm_datadist.config import LLMConfig, LlmConfig
from llm_datadist.data_type import DataType
from llm_datadist.datadist import LLMDataDist
from llm_datadist.errors import LLMException, LLMStatusCode, Status
from llm_datadist.kv_cache import KvCache
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

if TYPE_CHECKING:
    from llm_datadist.kv_cache_manager import KvCacheManager
    from llm_datadist.tensor import Tensor, TensorDesc

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
    # caches of the older interface (v1)
    "KvCacheManager",
    "KvCache",
    "Tensor",
    "TensorDesc",
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

#: Where the names are that are only imported when somebody asks for them.
_LATE = {
    "KvCacheManager": "llm_datadist.kv_cache_manager",
    "Tensor": "llm_datadist.tensor",
    "TensorDesc": "llm_datadist.tensor",
}


def __getattr__(name: str) -> object:
    module = _LATE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    return value
