"""Copies of rows and blocks inside one process, planned as pulls are.

After a failure or a time-out the addressed bytes are undefined.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from llm_datadist import _native
from llm_datadist._cache import geometry
from llm_datadist._cache.geometry import CacheKind, Geometry
from llm_datadist._cache.registry import DRAIN
from llm_datadist._checks import check_rule
from llm_datadist._native import CopyPool, Plan, Tensors, Use
from llm_datadist._native.public_call import whole
from llm_datadist.errors import CacheMismatch, CacheNotFound, ParamError
from llm_datadist.metrics import SwapStatistics
from llm_datadist.types import Cache, Placement

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llm_datadist._cache.local_caches import LocalCaches
    from llm_datadist._cache.registry import Entry
    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.device import Device

_WORKERS: Final = 4  # of swaps, at most one per usable CPU (interface R10)

#: Source blocks, shape ``(N,)``, and their destinations: ``(N,)``, or ``(L, N)`` for L lists.
Pairs = tuple["NDArray[np.int64]", "NDArray[np.int64]"]


class CacheRow(NamedTuple):
    cache_id: int
    row: int


@dataclass(frozen=True, slots=True)
class Operand:
    """Side of a copy; ``name`` is the caller's argument."""

    name: str
    geometry: Geometry
    tensors: Tensors

    @classmethod
    def of(cls, name: str, geometry: Geometry, addresses: list[int], device: Device) -> Operand:
        """Return memory of the caller; ParamError if it is not where ``geometry`` says."""
        if 0 in addresses:
            raise ParamError(f"{name}: tensor_addrs[{addresses.index(0)}]=0: an address cannot be zero")
        nbytes, placement = geometry.tensor_bytes, Placement(geometry.placement)
        place = device.place_of(f"{name}: tensor_addrs", addresses, nbytes, placement)
        return cls(name, geometry, Tensors(np.array(addresses, dtype=np.uint64), nbytes, place=place))


@dataclass(frozen=True, slots=True)
class LocalCopies:
    """Copies between own caches, or memory of the caller. Threads: any."""

    _caches: LocalCaches
    _swap: SwapEngine
    _pool: CopyPool | None

    def copy_cache(self, dst: CacheRow, src: CacheRow, offset: int, size: int, deadline: Deadline, what: str) -> int:
        """Copy part of a row to a row (interface R8); return the bytes."""
        hold, src_name, dst_name = self._caches.using, f"{what}: src", f"{what}: dst"
        with hold(src.cache_id, src_name) as source, hold(dst.cache_id, dst_name) as target:
            source.geometry.require_kind(src_name, CacheKind.CACHE)
            target.geometry.require_kind(dst_name, CacheKind.CACHE)
            plan = geometry.plan_copy_row(
                source.geometry, target.geometry, src_row=src.row, dst_row=dst.row, offset=offset, size=size
            )
            return self._execute(plan, target.storage.tensors, source.storage.tensors, deadline, what)

    def copy_blocks(self, cache_id: int, pairs: Pairs, deadline: Deadline) -> int:
        """Copy blocks inside one cache, in list order (interface R26); return the bytes."""
        with self._caches.using(cache_id, "copy_blocks: cache") as entry:
            cache = _operand("cache", entry, "copy_blocks")
            plan, _ = _plan_pairs(cache, cache, pairs, "copy_blocks", "copy_block_info")
            return self._execute(plan, cache.tensors, cache.tensors, deadline, "copy_blocks")

    def swap_blocks(self, src: Cache, dst: Cache, pairs: Pairs, ends: tuple[str, str]) -> int:
        """Move blocks between HOST and DEVICE (interface R10); return the bytes. Errors name ``ends``."""
        with self._use_of(ends[0], src) as src_entry, self._use_of(ends[1], dst) as dst_entry:
            source, target = self._swap_operand(ends[0], src, src_entry), self._swap_operand(ends[1], dst, dst_entry)
            plan, alias = _plan_pairs(source, target, pairs, "swap_blocks", "src_to_dst")
            if source.geometry.placement == target.geometry.placement:
                raise ParamError(
                    f"swap_blocks: {ends[0]} and {ends[1]} are both on {Placement(source.geometry.placement).name}; "
                    "one must be HOST and one DEVICE"
                )
            _refuse_overlap(source, target, alias, "swap_blocks")
            return self._swap.swap(plan, target, source)

    def copy_block_lists(
        self, src: int | Operand, dst: int | Operand, lists: Pairs, deadline: Deadline, what: str
    ) -> int:
        """Copy blocks ``(N,)`` to ``lists`` ``(L, N)``, in order (interface R13, R26); return the bytes.

        ``src`` and ``dst`` are ids of own caches, or memory of the caller. Between device and host it is a swap without
        a time limit (interface R6, R10), on the device a copy within ``deadline``.
        """
        with self._hold("src_cache", src, what) as src_held, self._hold("dst_cache", dst, what) as dst_held:
            source, target = _operand("src_cache", src_held, what), _operand("dst_cache", dst_held, what)
            plan, alias = _plan_blocks(source, target, lists, what, ("src_blocks", "dst_blocks_list"))
            host = [side.geometry.placement == Placement.HOST for side in (source, target)]
            if all(host):
                raise ParamError(f"{what}: src_cache and dst_cache are both on HOST; one must be on DEVICE")
            _refuse_overlap(source, target, alias, what)
            if any(host):
                return self._swap.swap(plan, target, source)
            return self._execute(plan, target.tensors, source.tensors, deadline, what)

    def _swap_operand(self, name: str, cache: Cache, entry: Entry | None) -> Operand:
        """Return a handle's operand; ``entry`` is the own cache of its id."""
        geometry, addresses = Geometry.of(cache.cache_desc, CacheKind.BLOCKS), list(cache.tensor_addrs)
        check_rule(len(addresses) == geometry.num_tensors, f"{name}: it has no memory any more (deallocated)")
        if entry is not None and entry.storage.tensors.bases.tolist() == addresses:
            # Not the handle's descriptor, whose shape the user may have changed.
            return Operand(name, entry.geometry, entry.storage.tensors)
        return Operand.of(name, geometry, addresses, self._caches.device)

    def _use_of(self, name: str, cache: Cache) -> Use[Entry] | nullcontext[None]:
        """Return the use of an own cache; nothing for a handle of another, or of none (interface §6.9)."""
        try:
            return self._caches.using(cache.cache_id, name)
        except CacheNotFound as error:
            if error.phase == DRAIN:  # its owner may unmap the memory soon
                raise
            return nullcontext()

    def _hold(self, name: str, operand: int | Operand, what: str) -> Use[Entry] | nullcontext[Operand]:
        """Return the use of an own cache, or memory of the caller."""
        return nullcontext(operand) if isinstance(operand, Operand) else self._caches.using(operand, f"{what}: {name}")

    def _execute(self, plan: Plan, dst: Tensors, src: Tensors, deadline: Deadline, what: str) -> int:
        done = _native.execute(plan, dst.native, src.native, self._pool, deadline.expires_ns, deadline.cancelled)
        if done < plan.nbytes:
            raise deadline.error(f"{what} ({done} of {plan.nbytes} bytes done)", "copy")
        return plan.nbytes


def _operand(name: str, held: Entry | Operand, what: str) -> Operand:
    if isinstance(held, Operand):
        return held
    held.geometry.require_kind(f"{what}: {name}", CacheKind.BLOCKS)
    return Operand(name, held.geometry, held.storage.tensors)


def _plan_blocks(
    source: Operand, target: Operand, pairs: Pairs, what: str, names: tuple[str, str]
) -> tuple[Plan, bool]:
    """Plan copies of blocks, in order; also return True if both sides are the same tensors. Errors use ``names``."""
    src, dst, (src_blocks, dst_blocks) = source.geometry, target.geometry, pairs
    if src.stride != dst.stride:
        raise CacheMismatch(
            f"{what}: block sizes differ: blocks of {source.name} have {src.stride} bytes, "
            f"of {target.name} {dst.stride}"
        )
    if src.num_tensors != dst.num_tensors:
        raise CacheMismatch(
            f"{what}: num_tensors differ: {source.name} has {src.num_tensors}, {target.name} {dst.num_tensors}"
        )
    # Host memory may stand for the device.
    alias = source is target or source.tensors.native.same_bases(target.tensors.native)
    if dst_blocks.ndim > 1:
        if int(dst_blocks.max()) >= dst.rows:  # the planner would name an index of the flat list
            i, j = (int(at) for at in np.unravel_index(dst_blocks.argmax(), dst_blocks.shape))
            raise ParamError(f"{names[1]}[{i}][{j}]={dst_blocks[i, j]}: must be in [0, {dst.rows})")
        src_blocks, dst_blocks = np.tile(src_blocks, len(dst_blocks)), dst_blocks.reshape(-1)
    plan = _native.plan_blocks(
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
    return plan, alias


def _plan_pairs(source: Operand, target: Operand, pairs: Pairs, what: str, name: str) -> tuple[Plan, bool]:
    """Plan as :func:`_plan_blocks`; errors name the key and the block in the caller's dict."""
    try:
        return _plan_blocks(source, target, pairs, what, (name, name))
    except CacheMismatch:
        raise
    except ParamError:
        for side, blocks in zip((source, target), pairs, strict=True):
            if (outside := np.flatnonzero(blocks >= side.geometry.rows)).size:
                at, sources = int(outside[0]), pairs[0]
                listed = f"[{at - int(np.argmax(sources == sources[at]))}]" if what == "copy_blocks" else ""
                where = f"key of {name}: " if blocks is sources else f"{name}[{sources[at]}]{listed}="
                raise ParamError(f"{where}{blocks[at]}: {side.name} has {side.geometry.rows} blocks") from None
        raise


def _refuse_overlap(source: Operand, target: Operand, alias: bool, what: str) -> None:
    """Raise ParamError if bytes are shared, except by the same tensors."""
    if alias:
        return
    one, other = source.tensors, target.tensors
    starts = np.sort(other.bases)
    after = np.searchsorted(starts, one.bases, side="right")
    below, above = starts[np.maximum(after, 1) - 1], starts[np.minimum(after, len(starts) - 1)]
    from_below = (below <= one.bases) & (one.bases - below < np.uint64(other.extent))
    from_above = (above >= one.bases) & (above - one.bases < np.uint64(one.extent))
    if (from_below | from_above).any():
        raise ParamError(f"{what}: tensors of {source.name} and {target.name} overlap without being the same")


class SwapEngine:
    """Swaps of blocks between host and device (interface R10), without a deadline.

    Owns: a pool of workers, at most ``cpus``, from the first swap to :meth:`close`. Threads: any.
    """

    def __init__(self, cpus: int | None = None) -> None:
        self._lock = threading.Lock()  # for the pool
        self.workers = min(_WORKERS, _native.usable_cpus() if cpus is None else cpus)
        self._copy_pool: _native.CopyPool | None = None

    def swap(self, plan: Plan, dst: Operand, src: Operand) -> int:
        """Execute a plan of whole blocks; return the bytes."""
        pool = self._copy_pool or self._make_pool()
        _native.execute(plan, dst.tensors.native, src.tensors.native, pool, _native.NO_DEADLINE)
        return plan.nbytes

    @whole
    def _make_pool(self) -> _native.CopyPool | None:
        """Return this engine's pool, because interface R10 fixes the number of workers; None without threads."""
        with self._lock:
            if self._copy_pool is None:
                with suppress(RuntimeError, MemoryError):
                    self._copy_pool = _native.CopyPool(self.workers)
            return self._copy_pool

    def statistics(self) -> SwapStatistics:
        return SwapStatistics(self.workers, 0)

    def close(self) -> None:
        with self._lock:
            if self._copy_pool is not None:
                self._copy_pool.close()
                self._copy_pool = None
