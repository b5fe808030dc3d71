"""Base of a rank of either connector: its LLMDataDist, the KV cache or slots for it, transfers that end on any thread.

Threads: vLLM's, unless stated.

Order on a GPU: vLLM submits a step, calls the connector, and goes on before the GPU has run it. What peers may read
waits for the step that writes it: grants on vLLM's thread, saves to a store on theirs. A load has its blocks while
earlier steps may still use them; its own thread waits for all that was submitted by then. Transfers return when all
bytes are there, and are reported then, so later steps need not wait. A GPU that fails raises in each of these waits:
it ends the engine on vLLM's thread, elsewhere the transfer. One that hangs raises in none; they last as long.
"""

from __future__ import annotations

import secrets
from contextlib import ExitStack, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from llm_datadist import CacheDesc, DataType
from llm_datadist._checks import check_timeout
from llm_datadist.devices import CudaDevice
from llm_datadist.errors import LLMException, OutOfMemory, StateError
from llm_datadist.integrations.vllm.identity import identity_of
from llm_datadist.integrations.vllm.instance import start_instance
from llm_datadist.integrations.vllm.kinds import describe, is_in_gpu, windows_of
from llm_datadist.integrations.vllm.layout import unsupported
from llm_datadist.integrations.vllm.staging import make_copier, make_slots, staged_slots
from llm_datadist.integrations.vllm.stats import Stats
from llm_datadist.views import torch_views

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import CopyBlocksOp
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from llm_datadist import BlocksCacheKey, Cache, LLMDataDist
    from llm_datadist.integrations.vllm.layout import Layout
    from llm_datadist.integrations.vllm.staging import PortableCopier

_IDLE_STEP_S: Final = 0.001
logger = init_logger("vllm.datadist")  # vLLM shows logs below its name


class Rank:
    """Base of a connector's half in one worker."""

    _layout: Layout  # from `_register` on
    _cache: Cache
    _rank: int
    _told: Any = None  # to the scheduler, with the next results

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, host: str | None) -> None:
        """Start an instance, which listens at ``host`` unless that is None."""
        option = vllm_config.kv_transfer_config.get_from_extra_config
        self._config, self._cache_config = vllm_config, kv_cache_config
        self._identity = identity_of(vllm_config)
        self.cluster_id = secrets.randbits(63)
        _, slots, slot_bytes = staged_slots(vllm_config, kv_cache_config, windows_of(kv_cache_config))
        self._slots = slots.stop
        sizes = [each.size for each in kv_cache_config.kv_cache_tensors] if option("pool", default=True) else []
        nbytes = self._slots * slot_bytes or max(sizes, default=0)  # vLLM's one allocation
        self._drain_ms = int(option("drain_ms", 3000))
        check_timeout(self._drain_ms or 1, "drain_ms")  # 0: no drain
        gpu = gpu_of_rank() if nbytes and is_in_gpu(vllm_config) else None
        self._in_gpu = gpu is not None
        try:
            self.datadist = start_instance(vllm_config, self.cluster_id, host, nbytes, gpu)
        except OutOfMemory as error:
            if gpu is None:
                raise
            text = f"{error}; lower gpu_memory_utilization"
            raise OutOfMemory(text, pool=error.pool, requested=error.requested, free=error.free) from error
        #: Puts the cache into the pool; None without one.
        self.allocation = PoolAllocation(self.datadist, nbytes, gpu) if nbytes and not self._slots else None
        self._idle = False  # this step has no tokens
        self._loads: dict[str, tuple[list[int], list[int]]] = {}  # by request: slots of its transfer, and their blocks
        self._ended: SimpleQueue[tuple[Any, Any]] = SimpleQueue()  # by any thread: what has ended, and how
        self._at_end = ExitStack()
        self.stats = Stats()

    def _drain(self) -> None:
        """Lend nothing more, and let peers' transfers end. Idempotent."""
        with suppress(StateError):  # not initialized any more, or in a finalizer, which must not wait
            if self._drain_ms and (left := self.datadist.drain(self._drain_ms)):
                logger.warning("shutdown: after %d ms this is given up: %s", self._drain_ms, left)

    def _register(self, views: dict[str, torch.Tensor], key: BlocksCacheKey | None, *, whole: bool = False) -> None:
        """Register vLLM's KV cache, or slots for it; a row is a ``whole`` block, or as the layout says."""
        self._rank = get_tensor_model_parallel_rank()
        if self._in_gpu and (self.allocation is None or self.allocation.cache is None):
            raise unsupported('KV that vLLM has allocated outside of the pool in the GPU, but with "staging": true')
        self._layout, addresses = describe(views, self._config, self._cache_config, self._identity)
        count, rows, parts = self._slots or self._cache_config.num_blocks, self._layout.rows, self._layout.row_bytes
        if self._slots:
            places = {names[0]: views[names[0]] for names in self._layout.places}
            blocks = {name: view.unflatten(0, (self._cache_config.num_blocks, -1)) for name, view in places.items()}
            slots = make_slots(self.datadist, self._slots, blocks)
            addresses = [view.data_ptr() for view in slots.values()]
            self._new_copier = partial(make_copier, blocks, slots)
        shape = [count, rows * parts] if whole else [count * rows, parts]
        desc = CacheDesc(len(addresses), shape, DataType.DT_INT8)
        self._cache = self.datadist.cache_manager.register_blocks_cache(desc, addresses, key, granted_only=True)

    def use_copies(self, operation: CopyBlocksOp) -> None:
        """Take vLLM's operation that copies blocks, after the KV cache."""
        if self._slots:
            self.copier: PortableCopier = self._new_copier(operation, self._at_end)

    def _submitted(self) -> Callable[[], object]:
        """Return a call, for any thread, that waits until a GPU has done what vLLM has submitted by now.

        Without a pool in a GPU it does nothing: steps on CPUs have run, and copies to slots wait.
        """
        if not self._in_gpu:
            return at_once
        event = torch.cuda.Event(blocking=True)
        event.record()  # in the current stream, in which vLLM's steps run
        return event.synchronize

    def _take_ended(self, *, wait: bool) -> Iterator[tuple[Any, Any]]:
        """Yield what has ended; if nothing has, ``wait`` a moment for it."""
        with suppress(Empty):
            yield self._ended.get(wait, _IDLE_STEP_S)
            while True:
                yield self._ended.get_nowait()

    def take_told(self) -> Any:
        """Return what there is to tell the scheduler since the last call."""
        found, self._told = self._told, type(self._told)()
        return found if found != self._told else None

    def _copy_loaded(self, request: str, *, failed: bool) -> None:
        """Copy a request's slots, if it has any, to its blocks, unless its transfer failed."""
        slots, blocks = self._loads.pop(request, ([], []))
        if slots and not failed:
            self.copier.load(slots, blocks)


def at_once() -> None:
    """Wait for nothing."""


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

    The pool of ``datadist`` must have room for them. vLLM's tensors keep it mapped until they are freed, also after
    ``finalize``.
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
