"""vLLM's KV cache in a pool, which peers of this host can map.

Owns: the pool is the instance's. vLLM's tensors keep its memory mapped until they are freed, also after `finalize`.
Threads: vLLM's.
Errors: a pool that cannot be made ends the start of the engine, and says what to change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from llm_datadist import CacheDesc, DataType
from llm_datadist.devices import CudaDevice
from llm_datadist.errors import LLMException
from llm_datadist.integrations.vllm.layout import unsupported
from llm_datadist.views import torch_views

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist import Cache, LLMDataDist


def gpu_of_rank() -> CudaDevice:
    """Return vLLM's current GPU, for a pool.

    The pool is sized by what profiling has left free, of which torch's allocator still keeps a part: it is given back.
    """
    torch.cuda.empty_cache()
    try:
        return CudaDevice(torch.cuda.current_device())
    except LLMException as error:
        raise unsupported(f'KV in a pool here: {error}; "staging": true does without one') from error


class PoolAllocation(TorchFunctionMode):
    """While active, answers one ``torch.zeros`` of ``nbytes`` int8 bytes on the CPU, or on ``gpu``, with pool memory.

    The pool of ``datadist`` must have room for them.
    """

    def __init__(self, datadist: LLMDataDist, nbytes: int, gpu: CudaDevice | None = None) -> None:
        super().__init__()
        self._datadist = datadist
        self._nbytes = nbytes
        self._device = torch.device("cpu", 0) if gpu is None else torch.device("cuda", gpu.ordinal)
        self.cache: Cache | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        wanted = self.cache is None and func is torch.zeros and args == (self._nbytes,) and self._suits(**given)
        if not wanted:
            return func(*args, **given)
        desc = CacheDesc(1, [1, self._nbytes], DataType.DT_INT8)
        self.cache = self._datadist.cache_manager.allocate_blocks_cache(desc, granted_only=True)
        memory = torch_views(self.cache)[0].reshape(-1)
        memory.zero_()  # on a GPU before the first step, in the same stream
        return memory

    def _suits(self, dtype: Any = None, device: Any = "cpu", **_: Any) -> bool:
        asked = torch.device(device)
        return dtype is torch.int8 and asked.type == self._device.type and asked.index in (None, self._device.index)
