"""Copies inside one process: rows, blocks of one cache, blocks of two. Plans and native copy are those of the pulls."""

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

__all__ = ["LocalCopies", "Operand"]


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a copy between two caches: what the caller knows it as, geometry and addresses."""

    name: str
    geometry: Geometry
    tensors: Tensors

    @classmethod
    def of(cls, name: str, geometry: Geometry, addresses: list[int]) -> Operand:
        """Return memory that is not ours; ``addresses`` has one per tensor.

        Raises:
            ParamError: An address is zero.
        """
        if 0 in addresses:
            raise ParamError(f"{name}: tensor_addrs[{addresses.index(0)}]=0: an address cannot be zero")
        return cls(name, geometry, Tensors(np.array(addresses, dtype=np.uint64), geometry.tensor_bytes))


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
            names = ("sources of copy_block_info", "destinations of copy_block_info")
            plan = _plan(entry.geometry, entry.geometry, src_blocks, dst_blocks, alias=True, names=names)
            self._execute(plan, entry.storage.tensors, entry.storage.tensors, deadline, "copy_blocks")
            return plan.nbytes

    def swap_blocks(
        self,
        src: Cache,
        dst: Cache,
        src_blocks: NDArray[np.int64],
        dst_blocks: NDArray[np.int64],
        *,
        ends: tuple[str, str] = ("src_cache", "dst_cache"),
    ) -> int:
        """Move blocks between a HOST and a DEVICE blocks cache (R10); return the bytes moved.

        ``ends``: what the caller knows the two caches as.

        Raises:
            ParamError: Sizes, counts, indices, placements do not fit, an address is zero, or a cache was deallocated.
            OutOfMemory: No staging memory on the device.
        """
        with self._operand(ends[0], src) as source, self._operand(ends[1], dst) as target:
            names = ("sources of src_to_dst", "destinations of src_to_dst")
            plan, alias = _plan_two(source, target, src_blocks, dst_blocks, "swap_blocks", names)
            if source.geometry.placement == target.geometry.placement:
                raise ParamError(
                    f"swap_blocks: {ends[0]} and {ends[1]} are both on {Placement(source.geometry.placement).name}; "
                    "one must be HOST and one DEVICE"
                )
            _refuse_overlap(source, target, alias, "swap_blocks")
            self._swap_plan(plan, source, target)
            return plan.nbytes

    @contextmanager
    def _operand(self, name: str, cache: Cache) -> Iterator[Operand]:
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
            if entry is not None and entry.storage.tensors.bases.tolist() == addresses:
                # Not the handle's descriptor: its shape is the user's own list, and may have changed since.
                yield Operand(name, entry.geometry, entry.storage.tensors)
            else:
                yield Operand.of(name, geometry, addresses)

    def copy_block_lists(
        self,
        src: int | Operand,
        dst: int | Operand,
        src_blocks: NDArray[np.int64],
        dst_lists: NDArray[np.int64],
        deadline: Deadline,
        what: str,
    ) -> int:
        """Copy one list of source blocks to each of several lists of destination blocks; return the bytes copied (R13).

        The pairs take effect list by list, in the order given (R26). Between device and host it is a swap, with its
        threads and staging and without a time limit (R6, R10); on the device a copy within ``deadline``.

        Args:
            src: Source: the id of a cache of ours, or memory of the caller.
            dst: Destination; may be the source.
            src_blocks: Shape ``(N,)``.
            dst_lists: Shape ``(L, N)``.

        Raises:
            CacheNotFound: No cache with such an id.
            ParamError: Sizes, counts, indices do not fit, both are on the host, or tensors overlap.
            OutOfMemory: No staging memory on the device.
            DeadlineExceeded: The addressed blocks are undefined.
        """
        with self._held("src_cache", src, what) as source, self._held("dst_cache", dst, what) as target:
            plan, alias = _plan_two(source, target, src_blocks, dst_lists, what, ("src_blocks", "dst_blocks_list"))
            host = [side.geometry.placement == Placement.HOST for side in (source, target)]
            if all(host):
                raise ParamError(f"{what}: src_cache and dst_cache are both on HOST; one must be on DEVICE")
            _refuse_overlap(source, target, alias, what)
            if any(host):
                self._swap_plan(plan, source, target)
            else:
                self._execute(plan, target.tensors, source.tensors, deadline, what)
            return plan.nbytes

    @contextmanager
    def _held(self, name: str, operand: int | Operand, what: str) -> Iterator[Operand]:
        if isinstance(operand, Operand):
            yield operand
            return
        with self._store.holding(operand, f"{what}: {name}") as entry:
            entry.geometry.require_kind(f"{what}: {name}", CacheKind.BLOCKS)
            yield Operand(name, entry.geometry, entry.storage.tensors)

    def _swap_plan(self, plan: Plan, source: Operand, target: Operand) -> None:
        block_bytes, to_device = target.geometry.stride, target.geometry.placement == Placement.DEVICE
        self._swap.swap(plan, target.tensors, source.tensors, block_bytes=block_bytes, to_device=to_device)

    def _execute(self, plan: Plan, dst: Tensors, src: Tensors, deadline: Deadline, what: str) -> None:
        done = native.execute(plan, dst, src, self._pool, deadline.expires_ns, deadline.cancelled)
        if done < plan.nbytes:
            raise deadline.error(f"{what} ({done} of {plan.nbytes} bytes done)", "copy")


def _plan_two(
    source: Operand,
    target: Operand,
    src_blocks: NDArray[np.int64],
    dst_blocks: NDArray[np.int64],
    what: str,
    names: tuple[str, str],
) -> tuple[Plan, bool]:
    """Plan blocks of one cache to blocks of another.

    Args:
        dst_blocks: Shape ``(N,)``, or ``(L, N)`` for L lists one after the other.
        names: What errors call the two lists.

    Returns:
        The plan, and whether both caches are the same tensors.
    """
    src, dst = source.geometry, target.geometry
    if src.stride != dst.stride:
        raise CacheMismatch(
            f"{what}: block sizes differ: blocks of {source.name} have {src.stride} bytes, "
            f"of {target.name} {dst.stride}"
        )
    if src.num_tensors != dst.num_tensors:
        raise CacheMismatch(
            f"{what}: num_tensors differ: {source.name} has {src.num_tensors}, {target.name} {dst.num_tensors}"
        )
    # Host memory may be the "device" here, so both caches may lie on the same tensors.
    alias = np.array_equal(source.tensors.bases, target.tensors.bases)
    if dst_blocks.ndim > 1:
        _check_lists(names[1], dst_blocks, dst.rows)
        src_blocks, dst_blocks = np.tile(src_blocks, len(dst_blocks)), dst_blocks.reshape(-1)
    return _plan(src, dst, src_blocks, dst_blocks, alias=alias, names=names), alias


def _check_lists(name: str, lists: NDArray[np.int64], rows: int) -> None:
    """Name the list and the place of a block that does not exist; behind it there is only one long list."""
    if int(lists.max()) >= rows:
        i, j = (int(at) for at in np.unravel_index(lists.argmax(), lists.shape))
        raise ParamError(f"{name}[{i}][{j}]={lists[i, j]}: must be in [0, {rows})")


def _refuse_overlap(source: Operand, target: Operand, alias: bool, what: str) -> None:
    if not alias and _overlap(source.tensors, target.tensors):
        raise ParamError(f"{what}: tensors of {source.name} and {target.name} overlap without being the same")


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
    names: tuple[str, str],
) -> Plan:
    """Plan block ``src_blocks[i]`` -> ``dst_blocks[i]`` in every tensor; errors call the two lists by ``names``."""
    return native.plan_blocks(
        dst_blocks,
        src_blocks,
        block_bytes=src.stride,
        dst_count=dst.rows,
        src_count=src.rows,
        alias=alias,
        tensors=(0, 0, src.num_tensors),
        dst_name=names[1],
        src_name=names[0],
    )
