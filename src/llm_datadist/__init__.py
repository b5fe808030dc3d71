"""open-datadist: LLM KV caches linked, published and moved between prefill and decode processes, on ordinary hosts.

An independent implementation of the LLM-DataDist interface; docs/architecture.md shows how it works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.config import LLMConfig, LlmConfig
from llm_datadist.datadist import LLMDataDist
from llm_datadist.errors import LLMException, LLMStatusCode, Status
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
from llm_datadist.types.data_type import DataType

if TYPE_CHECKING:
    from llm_datadist._transfer.layerwise import CacheTask
    from llm_datadist.kv_cache import KvCache, Tensor, TensorDesc
    from llm_datadist.kv_cache_manager import KvCacheManager

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
    "KvCache",
    "BlocksCacheKey",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "DataType",
    "Placement",
    # memory of the user
    "MemInfo",
    "Memtype",
    "RegisterMemStatus",
    # layer-wise transfer
    "CacheTask",
    "LayerSynchronizer",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    # what went wrong
    "LLMException",
    "LLMStatusCode",
    "Status",
    # the KvCacheManager mode
    "KvCacheManager",
    "Tensor",
    "TensorDesc",
]

#: All but the last three, which the original has in a package of its own.
v2_list = __all__[:23]

#: Loaded when they are first asked for: most programs use one of the two managers, and no layer-wise task.
_LATE = {
    "CacheTask": "llm_datadist._transfer.layerwise",
    "KvCache": "llm_datadist.kv_cache",
    "KvCacheManager": "llm_datadist.kv_cache_manager",
    "Tensor": "llm_datadist.kv_cache",
    "TensorDesc": "llm_datadist.kv_cache",
}


def __getattr__(name: str) -> object:
    """Import a name of ``_LATE`` when it is first asked for."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_LATE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
