"""Copies inside one process: copy_cache, copy_blocks, swap_blocks. The same plans and the same native copy as pulls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llm_datadist import native
from llm_datadist.cache import layout
from llm_datadist.cache.layout import CacheKind, Geometry, LayerSelection
from llm_datadist.errors import ParamError
from llm_datadist.native import Plan, Tensors
from llm_datadist.types import Cache, Placement

if TYPE_CHECKING:
    from llm_datadist.caches import CacheStore
    from llm_datadist.deadline import Deadline
    from llm_datadist.native import CopyPool
    from llm_datadist.swap import SwapEngine

__all__ = ["LocalCopies"]

_ALL_LAYERS = LayerSelection(None, None, 1)


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
            plan = layout.plan_copy_row(
                src.geometry, dst.geometry, src_row=src_row, dst_row=dst_row, offset=offset, size=size
            )
            self._execute(plan, dst.storage.tensors, src.storage.tensors, deadline, what)
            return plan.nbytes

    def copy_blocks(self, cache_id: int, pairs: dict[int, list[int]], deadline: Deadline) -> int:
        """Copy blocks inside one cache, in the order given (R26); return the bytes copied."""
        src, dst = _flatten(pairs)
        with self._store.holding(cache_id, "copy_blocks: cache") as entry:
            entry.geometry.require_kind("copy_blocks: cache", CacheKind.BLOCKS)
            runs, ordered = native.plan_blocks(
                native.parse_indices("dst_blocks", dst),
                native.parse_indices("src_blocks", src),
                block_bytes=entry.geometry.stride,
                dst_count=entry.geometry.rows,
                src_count=entry.geometry.rows,
                alias=True,
                dst_name="dst_blocks of copy_block_info",
                src_name="src_blocks of copy_block_info",
            )
            count = entry.geometry.num_tensors
            plan = Plan(0, 0, count, runs, ordered, int(runs[:, 2].sum()) * count)
            self._execute(plan, entry.storage.tensors, entry.storage.tensors, deadline, "copy_blocks")
            return plan.nbytes

    def swap_blocks(self, src: Cache, dst: Cache, src_to_dst: dict[int, int]) -> int:
        """Move blocks between a HOST and a DEVICE blocks cache (R10); return the bytes moved.

        Raises:
            ParamError: Sizes, counts, indices, placements do not fit, or a cache was deallocated.
            OutOfMemory: No staging memory on the device.
        """
        src_geometry, src_tensors = _operand("src_cache", src)
        dst_geometry, dst_tensors = _operand("dst_cache", dst)
        if src_geometry.placement == dst_geometry.placement:
            raise ParamError(
                f"swap_blocks: src_cache and dst_cache are both on {Placement(src_geometry.placement).name}; one must "
                "be HOST and one DEVICE"
            )
        plan = layout.plan_blocks(
            src_geometry,
            dst_geometry,
            native.parse_indices("src_blocks", list(src_to_dst.keys())),
            native.parse_indices("dst_blocks", list(src_to_dst.values())),
            _ALL_LAYERS,
        )
        to_device = dst_geometry.placement == Placement.DEVICE
        self._swap.swap(plan, dst_tensors, src_tensors, block_bytes=dst_geometry.stride, to_device=to_device)
        return plan.nbytes

    def _execute(self, plan: Plan, dst: Tensors, src: Tensors, deadline: Deadline, what: str) -> None:
        done = native.execute(plan, dst, src, self._pool, deadline.expires_ns)
        if done < plan.nbytes:
            raise deadline.error(f"{what} ({done} of {plan.nbytes} bytes done)", "copy")


def _operand(name: str, cache: Cache) -> tuple[Geometry, Tensors]:
    """Geometry and addresses of a swap operand: its handle alone counts, registered or not (API §6.9)."""
    geometry = Geometry.of(cache.cache_desc, CacheKind.BLOCKS)
    addresses = cache.tensor_addrs
    if len(addresses) != geometry.num_tensors:
        raise ParamError(f"{name}: it has no memory any more (deallocated)")
    return geometry, Tensors(np.array(addresses, dtype=np.uint64), geometry.tensor_bytes)


def _flatten(pairs: dict[int, list[int]]) -> tuple[list[int], list[int]]:
    """Turn {src: [dst, ...]} into two lists of equal length, in the order given."""
    src = [source for source, targets in pairs.items() for _ in targets]
    dst = [target for targets in pairs.values() for target in targets]
    return src, dst
