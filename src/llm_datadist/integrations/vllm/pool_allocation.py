"""vLLM's KV cache in a pool, which peers of this host can map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from llm_datadist import CacheDesc, DataType
from llm_datadist.views import torch_views

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist import Cache, LLMDataDist


class PoolAllocation(TorchFunctionMode):
    """While active, answers one ``torch.zeros`` of ``nbytes`` int8 bytes on the CPU with pool memory.

    The pool of ``datadist`` must have room for them.
    """

    def __init__(self, datadist: LLMDataDist, nbytes: int) -> None:
        super().__init__()
        self._datadist = datadist
        self._nbytes = nbytes
        self.cache: Cache | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        wanted = self.cache is None and func is torch.zeros and args == (self._nbytes,)
        if not wanted or given.get("dtype") is not torch.int8 or torch.device(given.get("device", "cpu")).type != "cpu":
            return func(*args, **given)
        desc = CacheDesc(1, [1, self._nbytes], DataType.DT_INT8)
        self.cache = self._datadist.cache_manager.allocate_blocks_cache(desc, granted_only=True)
        memory = torch_views(self.cache)[0].reshape(-1)
        memory.zero_()
        return memory
