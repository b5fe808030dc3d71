"""This library inside one process: copies, the planner, the allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from llm_datadist import Cache, LLMDataDist, Placement
from llm_datadist._cache.geometry import CacheKind, Geometry, LayerSelection, compare_blocks
from llm_datadist.tools.bench import WrongBytes
from llm_datadist.tools.bench.contenders.base import Contender, Facts, Role
from llm_datadist.tools.bench.contenders.ours import desc_of, make_cache, open_instance, pool_bytes_for
from llm_datadist.tools.bench.workload import BenchMemory, BenchWorkload, Op, private_tensors
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llm_datadist._native import Plan

#: Orders of the blocks that take turns, so that no plan repeats the last one.
_ORDERS: Final = 8
#: Bytes for one block: two block numbers and its run.
_PLAN_BYTES: Final = 5 * 8


class Local(Contender):
    """One LLMDataDist in one process."""

    roles: ClassVar[tuple[Role, ...]] = (Role.ALONE,)
    caches: ClassVar[int] = 1

    def start(self) -> Facts:
        size = pool_bytes_for(self.workload) * self.caches
        self._datadist: LLMDataDist = open_instance(Role.SOURCE, self.workload, "inproc", pool_bytes=size)
        self.prepare()
        return {"transport": "local"}

    def prepare(self) -> None:
        """Make the caches."""

    def stop(self) -> None:
        self._datadist.finalize()


class CopyBlocks(Local):
    """copy_blocks inside one blocks cache: even blocks to odd ones."""

    ops = (Op.COPY, Op.D2D)
    memories = tuple(BenchMemory)
    sets = 1

    def prepare(self) -> None:
        self._cache, self.source_views = make_cache(self._datadist, self.workload)
        self.destination_views = self.source_views
        self._info = {src: [dst] for src, dst in self.workload.pairs}

    def transfer(self) -> None:
        self._datadist.cache_manager.copy_blocks(self._cache, self._info)


class CopyCache(Local):
    """copy_cache between two continuous caches: one call for each row of ``block_bytes`` in each tensor."""

    ops = (Op.COPY,)
    memories = tuple(BenchMemory)
    caches = 2

    def prepare(self) -> None:
        self._src, self.source_views = make_cache(self._datadist, self.workload, paged=False)
        self._dst, self.destination_views = make_cache(self._datadist, self.workload, paged=False)
        self._pairs = self.workload.pairs

    def transfer(self) -> None:
        copy, src, dst = self._datadist.cache_manager.copy_cache, self._src, self._dst
        for src_row, dst_row in self._pairs:
            copy(dst, src, dst_row, src_row)


class SwapBlocks(Local):
    """swap_blocks from a blocks cache of the device to one in host memory; h2d and d2h: to or from one of its pool."""

    ops = (Op.SWAP, Op.H2D, Op.D2H)
    memories = tuple(BenchMemory)

    def prepare(self) -> None:
        device, there = make_cache(self._datadist, self.workload)
        desc = desc_of(self.workload, placement=Placement.HOST)
        if self.workload.op is Op.SWAP:
            here = private_tensors(self.workload)
            host = Cache.create_cpu_cache(desc, [each.ctypes.data for each in here])
        else:
            host = self._datadist.cache_manager.allocate_blocks_cache(desc)
            here = tensor_views(host)
        sides = [(device, there), (host, here)]
        (self._src, self.source_views), (self._dst, self.destination_views) = (
            sides[::-1] if self.workload.op is Op.H2D else sides
        )
        self._pairs = dict(self.workload.pairs)

    def transfer(self) -> None:
        self._datadist.cache_manager.swap_blocks(self._src, self._dst, self._pairs)


class Planning(Contender):
    """The planner alone, for a pull of ``blocks`` random blocks in every tensor. Moves nothing."""

    ops: ClassVar[tuple[Op, ...]] = (Op.PLAN,)
    roles: ClassVar[tuple[Role, ...]] = (Role.ALONE,)

    @classmethod
    def footprint(cls, workload: BenchWorkload) -> int:
        return _ORDERS * workload.blocks * _PLAN_BYTES

    def start(self) -> Facts:
        self._geometry = Geometry.of(desc_of(self.workload), CacheKind.BLOCKS)
        self._layers = LayerSelection(None, None, 2)
        self._orders = [self._order(number) for number in range(_ORDERS)]
        return {"transport": "local"}

    def transfer_one(self, index: int) -> None:
        src, dst = self._orders[index % _ORDERS]
        self._plan = compare_blocks(self._geometry, self._geometry, self._layers).plan(dst, src)

    def verify(self, seed: int) -> bool:
        """Compare a plan with its blocks, in any order."""
        size = self.workload.block_bytes
        src, dst = self._orders[0]
        plan: Plan = compare_blocks(self._geometry, self._geometry, self._layers).plan(dst, src)
        wanted = np.column_stack([dst * size, src * size, np.full(len(src), size)]).astype(np.uint64)
        got = np.asarray(plan.runs)
        same = np.array_equal(got[np.argsort(got[:, 0])], wanted[np.argsort(wanted[:, 0])])
        if not same or plan.count != self.workload.tensors:
            raise WrongBytes("the plan is not what was asked for")
        return True

    def _order(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        shuffle = np.random.default_rng([self.workload.seed, 2, number]).permutation(self.workload.blocks)
        return self.workload.src_blocks[shuffle], self.workload.dst_blocks[shuffle]


class Allocating(Local):
    """Steps that each allocate a blocks cache in an empty pool and deallocate it."""

    ops = (Op.ALLOC,)
    pool_only = "registered memory is not allocated"
    sets = 1

    def prepare(self) -> None:
        self._desc = desc_of(self.workload)

    def transfer_one(self, index: int) -> None:
        manager = self._datadist.cache_manager
        manager.deallocate_blocks_cache(manager.allocate_blocks_cache(self._desc))

    def verify(self, seed: int) -> bool:
        """Check that tensors do not overlap and the pool is empty again."""
        manager = self._datadist.cache_manager
        cache = manager.allocate_blocks_cache(self._desc)
        addresses = np.sort(np.array(cache.tensor_addrs, dtype=np.uint64))
        manager.deallocate_blocks_cache(cache)
        if len(addresses) != self.workload.tensors or (np.diff(addresses) < self.workload.tensor_bytes).any():
            raise WrongBytes("tensors of one cache overlap, or some are missing")
        if used := sum(pool.used_bytes for pool in self._datadist.statistics().pools):
            raise WrongBytes(f"{used} bytes of the pool are still in use")
        return True
