"""open-datadist: KV caches moved between prefill and decode processes, on ordinary hosts.

An independent implementation of the LLM-DataDist interface; docs/architecture.md describes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.config import LLMConfig, LlmConfig
from llm_datadist.datadist import LLMDataDist, PeerLink as PeerLink
from llm_datadist.errors import (
    AlreadyLinked as AlreadyLinked,
    AuthFailed as AuthFailed,
    CacheError as CacheError,
    CacheMismatch as CacheMismatch,
    CacheNotFound as CacheNotFound,
    ChecksumMismatch as ChecksumMismatch,
    DeadlineExceeded as DeadlineExceeded,
    DeviceError as DeviceError,
    GrantEnded as GrantEnded,
    KeyInUse as KeyInUse,
    LinkError as LinkError,
    LinkRefused as LinkRefused,
    LLMException,
    LLMStatusCode,
    NoneArgument as NoneArgument,
    NotInitialized as NotInitialized,
    NotLinked as NotLinked,
    OutOfMemory as OutOfMemory,
    ParamError as ParamError,
    PeerLost as PeerLost,
    ProtocolError as ProtocolError,
    StateError as StateError,
    Status,
    TransferAborted as TransferAborted,
    TransferFailed as TransferFailed,
)
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
    from llm_datadist.cache_manager import CacheManager as CacheManager
    from llm_datadist.kv_cache import KvCache, Tensor, TensorDesc
    from llm_datadist.kv_cache_manager import KvCacheManager
    from llm_datadist.types.grant import Grant as Grant

__version__ = "0.2.0"

__all__ = [  # noqa: RUF022 (grouped by purpose)
    # an instance
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
    # failures
    "LLMException",
    "LLMStatusCode",
    "Status",
    # the KvCacheManager mode
    "KvCacheManager",
    "Tensor",
    "TensorDesc",
]

#: All but the last three, which the original has in another package.
v2_list = __all__[:23]

#: Imported at first use: most programs need one of the managers, and no layer-wise task.
_LATE = {
    "CacheManager": "llm_datadist.cache_manager",
    "CacheTask": "llm_datadist._transfer.layerwise",
    "Grant": "llm_datadist.types.grant",
    "KvCache": "llm_datadist.kv_cache",
    "KvCacheManager": "llm_datadist.kv_cache_manager",
    "Tensor": "llm_datadist.kv_cache",
    "TensorDesc": "llm_datadist.kv_cache",
}


if not TYPE_CHECKING:  # checkers would accept any name of the module

    def __getattr__(name: str) -> object:
        """Import a name of ``_LATE`` at first use."""
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value: object = getattr(import_module(_LATE[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
