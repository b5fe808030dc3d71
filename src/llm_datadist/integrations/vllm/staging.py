"""Staging: the KV of an accelerator passes through slots, host memory in this rank's pool, which peers can read.

A slot holds one block of any group, because the layers of all groups share the places of a block. The scheduler gives
out slots (:class:`SlotPool`); its orders name slots and blocks, the same on all ranks; workers copy.

| | prompt to be offered | KV to be fetched |
|---|---|---|
| gets its slots | before its first step | before it gets blocks |
| copies | after each step; then its last is granted | once pulled; then it is reported |
| frees its slots | once its grants ended on all ranks; at its end if not offered | with the report |

With a store (`store_scheduler.py`) a save has slots of the first column until all ranks have ended it, and a load those
of the second, from the step in which it gets blocks.

An offer or a fetch gets all its slots or none, and none after its request has got blocks: until then that waits in
vLLM's queue. So whoever has slots waits for blocks only, and no two requests wait for each other. Preempted requests
wait for both again.

Threads: vLLM's copies; an engine's pulls into slots, and has ended when the fetch is reported.
Errors: a copy that fails ends the engine, as a failed step does.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

import torch
from vllm.logger import init_logger

from llm_datadist import CacheDesc, DataType
from llm_datadist.errors import ParamError
from llm_datadist.views import torch_views

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import CopyBlocksOp
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from llm_datadist import LLMDataDist
    from llm_datadist.integrations.vllm.offers import Targets

Views = dict[str, torch.Tensor]  # of each place, under the name of its first layer

logger = init_logger("vllm.datadist.staging")

_MAPPED: Final = 2  # cudaHostRegisterMapped


def staged_slots(config: VllmConfig, cache: KVCacheConfig, windows: Sequence[int | None]) -> tuple[range, range, int]:
    """Return an engine's slots for offers and for fetches, by its role, and the bytes of one; none if not staged.

    They are apart, because an offer waits for a reader, which may wait for slots of its engine. ``windows`` has the
    tokens that each transferred group looks back, None for all. Raises ParamError if one request may need more slots.
    """
    transfer = config.kv_transfer_config
    option = transfer.get_from_extra_config
    if not option("staging", None):
        return range(0), range(0), 0
    tokens, roles = config.model_config.max_model_len, transfer.is_kv_producer + transfer.is_kv_consumer
    slot_bytes = max(each.size for each in cache.kv_cache_tensors) // cache.num_blocks
    needed = slot_bytes * roles * sum(blocks_of(tokens, each, config.cache_config.block_size) for each in windows)
    nbytes = int(option("staging_bytes", max(needed, 4 << 30)))
    if nbytes < needed:
        raise ParamError(f"staging_bytes={nbytes}: requests of max_model_len={tokens} tokens need {needed}")
    count = nbytes // slot_bytes
    middle = count // roles if transfer.is_kv_producer else 0
    return range(middle), range(middle, count), slot_bytes


def blocks_of(tokens: int, window: int | None, block_tokens: int) -> int:
    """Return the most blocks that a group may need of so many tokens."""
    blocks = -(-tokens // block_tokens)
    return blocks if window is None else min(blocks, -(-window // block_tokens) + 1)


class SlotPool:
    """Free slots, and those that requests have. Threads: the scheduler's.

    Once a request did not get its slots, none gets any until the next step: vLLM asks in the order of its queue, in
    which small requests must not pass a large one for ever.
    """

    def __init__(self, slots: Iterable[int]) -> None:
        self._free = list(slots)
        self.held: dict[str, Targets] = {}
        self._saved: dict[str, int] = {}  # by request: its first blocks, which are in their slots
        self.closed = False  # until the step ends

    def take(self, request: str, spans: list[tuple[int, int]]) -> Targets:
        """Return a slot for each block of these spans, those that the request has if they suit; none if it waits."""
        held = self.held.get(request, [])
        if [(first, first + len(slots)) for first, slots in held] == spans:
            return held
        self.free(request)
        if self.closed or len(self._free) < sum(end - first for first, end in spans):
            self.closed = True
            return []
        self.held[request] = [(first, [self._free.pop() for _ in range(first, end)]) for first, end in spans]
        return self.held[request]

    def free(self, request: str) -> None:
        """Take back the request's slots, if it has any."""
        for _, slots in self.held.pop(request, ()):
            self._free += slots
        self._saved.pop(request, None)

    def save(self, request: str, blocks: Sequence[list[int]], end: int) -> list[tuple[int, int]]:
        """Return those of the request's first ``end`` blocks that are not in their slots yet, each with its slot."""
        begin, self._saved[request] = self._saved.get(request, 0), end
        found: list[tuple[int, int]] = []
        for (first, slots), group in zip(self.held[request], blocks, strict=True):
            low, high = max(begin, first), max(end, first)
            found += zip(group[low:high], slots[low - first : high - first], strict=True)
        return found


class PortableCopier:
    """Copies between device blocks and slots by ``op``, an operation like vLLM's, which waits. Threads: vLLM's."""

    def __init__(self, device: Views, slots: Views, op: CopyBlocksOp) -> None:
        self.device, self.slots, self._op = device, slots, op

    def save(self, blocks: list[int], slots: list[int]) -> None:
        """Copy blocks to slots; return once the slots have all bytes that the running step writes."""
        self._op(self.device, self.slots, blocks, slots, "d2h")

    def load(self, slots: list[int], blocks: list[int]) -> None:
        """Copy slots to blocks; return once the slots may be overwritten, and later steps read the new bytes."""
        self._op(self.slots, self.device, slots, blocks, "h2d")


def copy_here(sources: Views, targets: Views, source_ids: list[int], target_ids: list[int], _: str) -> None:
    """Copy as vLLM's operation does, in host memory; NumPy takes half the time of torch."""
    for name, source in sources.items():
        block_rows(targets[name]).numpy()[target_ids] = block_rows(source).numpy()[source_ids]


def copy_on_cuda(sources: Views, targets: Views, source_ids: list[int], target_ids: list[int], _: str) -> None:
    """Copy as vLLM's operation does, rows of blocks and of locked slots."""
    there, here = torch.tensor(source_ids, device="cuda"), torch.tensor(target_ids, device="cuda")
    for name, source in sources.items():
        targets[name].index_copy_(0, here, source.index_select(0, there))
    torch.cuda.current_stream().synchronize()


def make_copier(device: Views, slots: Views, op: CopyBlocksOp, at_end: ExitStack) -> PortableCopier:
    """Return a copier by vLLM's ``op``, or by ours, for which CUDA locks the slots until ``at_end``."""
    kind = next(iter(device.values())).device.type
    if kind == "cuda":  # ROCm's, too
        views, runtime = list(slots.values()), torch.cuda.cudart()
        begin, end = views[0].data_ptr(), views[-1].data_ptr() + views[-1].nbytes
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(begin, end - begin, _MAPPED))
        except RuntimeError as error:
            with suppress(RuntimeError):  # the next kernel raises the same error, once
                torch.zeros(1, device="cuda")
            logger.warning("staged blocks are copied slowly: the slots cannot be locked: %s", error)
        else:
            at_end.callback(runtime.cudaHostUnregister, begin)
            device, op = {name: block_rows(view) for name, view in device.items()}, copy_on_cuda
            slots = {name: block_rows(view, locked=True) for name, view in slots.items()}
    return PortableCopier(device, slots, copy_here if kind == "cpu" else op)  # vLLM's for CPUs fails


def block_rows(view: torch.Tensor, *, locked: bool = False) -> torch.Tensor:
    """Return the bytes of each block of a place, in words if they are whole; those of locked slots as a device's."""
    rows = view.as_strided((len(view), view.stride(0)), (view.stride(0), 1)).view(torch.int8)
    rows = rows if rows.shape[1] % 8 else rows.view(torch.int64)
    if not locked:
        return rows
    what = {"shape": tuple(rows.shape), "typestr": rows.numpy().dtype.str, "data": (rows.data_ptr(), False)}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=what | {"version": 3}), device="cuda")


def make_slots(datadist: LLMDataDist, count: int, blocks: Views) -> Views:
    """Return ``count`` slots in the pool for each place, with their bytes in the order of its blocks.

    ``blocks`` has the blocks of each place in its first dimension, without gaps; all places are alike.
    """
    view = next(iter(blocks.values()))
    desc = CacheDesc(1, [len(blocks), view.nbytes // len(view) * count], DataType.DT_INT8)
    parts = torch_views(datadist.cache_manager.allocate_blocks_cache(desc, granted_only=True))[0].view(view.dtype)
    shape = count, *view.shape[1:]
    return {name: part.as_strided(shape, view.stride()) for name, part in zip(blocks, parts, strict=True)}
