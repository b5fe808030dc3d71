"""Copies inside one process: copy_cache, copy_blocks, swap_blocks. The same plans and the same native copy as pulls."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist import native
from llm_datadist.cache import layout
from llm_datadist.cache.layout import CacheKind, Geometry
from llm_datadist.errors import CacheMismatch, CacheNotFound, ParamError
from llm_datadist.native import Plan, Tensors
from llm_datadist.types import Placement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from llm_datadist.caches import CacheStore
    from llm_datadist.deadline import Deadline
    from llm_datadist.native import CopyPool
    from llm_datadist.swap import SwapEngine
    from llm_datadist.types import Cache

__all__ = ["LocalCopies"]


class LocalCopies:
    """Runs in the caller's thread; holds the caches' memory for the length of each call."""

    def __init__(self, store: CacheStore, swap: SwapEngine, pool: CopyPool | None) -> None:
        self._store = store
        self._swap = swap
        self._pool = pool

    def copy_cache(
        self,
        dst_id: int,
        src_id: int,
        *,
        dst_row: int,
        src_row: int,
        offset: int,
        size: int,
        deadline: Deadline,
        what: str,
    ) -> int:
        """Copy part of a row to a row (R8); return the bytes copied."""
        with self._store.holding(src_id, f"{what}: src") as src, self._store.holding(dst_id, f"{what}: dst") as dst:
            src.geometry.require_kind(f"{what}: src", CacheKind.CACHE)
            dst.geometry.require_kind(f"{what}: dst", CacheKind.CACHE)
            plan = layout.plan_copy_row(
                src.geometry, dst.geometry, src_row=src_row, dst_row=dst_row, offset=offset, size=size
            )
            self._execute(plan, dst.storage.tensors, src.storage.tensors, deadline, what)
            return plan.nbytes

    def copy_blocks(
        self, cache_id: int, src_blocks: NDArray[np.int64], dst_blocks: NDArray[np.int64], deadline: Deadline
    ) -> int:
        """Copy blocks inside one cache, in the order given (R26); return the bytes copied."""
        with self._store.holding(cache_id, "copy_blocks: cache") as entry:
            entry.geometry.require_kind("copy_blocks: cache", CacheKind.BLOCKS)
            plan = _plan(entry.geometry, entry.geometry, src_blocks, dst_blocks, alias=True, argument="copy_block_info")
            self._execute(plan, entry.storage.tensors, entry.storage.tensors, deadline, "copy_blocks")
            return plan.nbytes

    def swap_blocks(self, src: Cache, dst: Cache, src_blocks: NDArray[np.int64], dst_blocks: NDArray[np.int64]) -> int:
        """Move blocks between a HOST and a DEVICE blocks cache (R10); return the bytes moved.

        Raises:
            ParamError: Sizes, counts, indices, placements do not fit, an address is zero, or a cache was deallocated.
            OutOfMemory: No staging memory on the device.
        """
        with self._operand("src_cache", src) as source, self._operand("dst_cache", dst) as target:
            plan = _plan_swap(source, target, src_blocks, dst_blocks)
            block_bytes, to_device = target.geometry.stride, target.geometry.placement == Placement.DEVICE
            self._swap.swap(plan, target.tensors, source.tensors, block_bytes=block_bytes, to_device=to_device)
            return plan.nbytes

    @contextmanager
    def _operand(self, name: str, cache: Cache) -> Iterator[_Operand]:
        """Yield geometry and addresses of a swap operand; a cache of ours keeps its memory meanwhile.

        The handle alone counts, registered or not (API §6.9): ids of caches that are not ours mean nothing here.
        """
        geometry = Geometry.of(cache.cache_desc, CacheKind.BLOCKS)
        with ExitStack() as held:
            try:
                entry = held.enter_context(self._store.holding(cache.cache_id, name))
            except CacheNotFound:
                entry = None
            addresses = list(cache.tensor_addrs)
            if len(addresses) != geometry.num_tensors:
                raise ParamError(f"{name}: it has no memory any more (deallocated)")
            if 0 in addresses:
                raise ParamError(f"{name}: tensor_addrs[{addresses.index(0)}]=0: an address cannot be zero")
            if entry is not None and entry.storage.tensors.bases.tolist() == addresses:
                # Not the handle's descriptor: its shape is the user's own list, and may have changed since.
                yield _Operand(entry.geometry, entry.storage.tensors)
            else:
                yield _Operand(geometry, Tensors(np.array(addresses, dtype=np.uint64), geometry.tensor_bytes))

    def _execute(self, plan: Plan, dst: Tensors, src: Tensors, deadline: Deadline, what: str) -> None:
        done = native.execute(plan, dst, src, self._pool, deadline.expires_ns)
        if done < plan.nbytes:
            raise deadline.error(f"{what} ({done} of {plan.nbytes} bytes done)", "copy")


@dataclass(frozen=True, slots=True)
class _Operand:
    """One side of a swap."""

    geometry: Geometry
    tensors: Tensors


def _plan_swap(
    source: _Operand, target: _Operand, src_blocks: NDArray[np.int64], dst_blocks: NDArray[np.int64]
) -> Plan:
    src, dst = source.geometry, target.geometry
    if src.stride != dst.stride:
        raise CacheMismatch(
            f"swap_blocks: block sizes differ: blocks of src_cache have {src.stride} bytes, of dst_cache {dst.stride}"
        )
    if src.num_tensors != dst.num_tensors:
        raise CacheMismatch(
            f"swap_blocks: num_tensors differ: src_cache has {src.num_tensors}, dst_cache {dst.num_tensors}"
        )
    # Host memory may be the "device" here, so both caches may lie on the same tensors.
    alias = np.array_equal(source.tensors.bases, target.tensors.bases)
    plan = _plan(src, dst, src_blocks, dst_blocks, alias=alias, argument="src_to_dst")
    if src.placement == dst.placement:
        raise ParamError(
            f"swap_blocks: src_cache and dst_cache are both on {Placement(src.placement).name}; one must be HOST and "
            "one DEVICE"
        )
    if not alias and _overlap(source.tensors, target.tensors):
        raise ParamError("swap_blocks: tensors of src_cache and dst_cache overlap without being the same")
    return plan


def _overlap(one: Tensors, other: Tensors) -> bool:
    """Return True when a byte belongs to both ends."""
    starts = np.sort(other.bases)
    after = np.searchsorted(starts, one.bases, side="right")
    below, above = starts[np.maximum(after, 1) - 1], starts[np.minimum(after, len(starts) - 1)]
    from_below = (below <= one.bases) & (one.bases - below < np.uint64(other.extent))
    from_above = (above >= one.bases) & (above - one.bases < np.uint64(one.extent))
    return bool((from_below | from_above).any())


def _plan(
    src: Geometry,
    dst: Geometry,
    src_blocks: NDArray[np.int64],
    dst_blocks: NDArray[np.int64],
    *,
    alias: bool,
    argument: str,
) -> Plan:
    """Plan block ``src_blocks[i]`` -> ``dst_blocks[i]`` in every tensor; errors speak of ``argument``."""
    runs, ordered = native.plan_blocks(
        dst_blocks,
        src_blocks,
        block_bytes=src.stride,
        dst_count=dst.rows,
        src_count=src.rows,
        alias=alias,
        dst_name=f"destinations of {argument}",
        src_name=f"sources of {argument}",
    )
    return Plan(0, 0, src.num_tensors, runs, ordered, int(runs[:, 2].sum()) * src.num_tensors)
