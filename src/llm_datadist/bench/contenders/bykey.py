"""pull_cache by key, as in serving: a cache is allocated, published, pulled once, and freed."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from llm_datadist import Cache, CacheDesc, CacheKey, DataType, LLMDataDist
from llm_datadist.bench.contenders.base import Facts, Role
from llm_datadist.bench.contenders.ours import CLUSTER, Ours, open_instance, pool_bytes_for
from llm_datadist.bench.workload import Op, fill
from llm_datadist.views import tensor_views

_CONSUMED_S: Final = 10.0
_LOOK_AGAIN_S: Final = 0.001


class ByKey(Ours):
    """Steps that each pull a cache of one row by its key.

    Before each pass the source allocates a cache for each block, binds its key and deallocates the cache.
    """

    ops = (Op.LATENCY,)
    pool_only = "pulling a registered cache consumes no key"

    def start(self) -> Facts:
        self._datadist = self._open(self.role)
        if self.role is Role.DESTINATION:
            self._cache = self._datadist.cache_manager.allocate_cache(self._desc(self.workload.rows))
            self.own(tensor_views(self._cache))
            numbers = self.workload.dst_blocks.tolist()
            self._steps = [(CacheKey(CLUSTER[Role.SOURCE], index), row) for index, row in enumerate(numbers)]
        return {"port": self._datadist.listen_port}

    def fill(self, seed: int) -> None:
        if self.role is not Role.SOURCE:
            return
        shape = (self.workload.rows, self.workload.block_bytes)
        tensors = [np.empty(shape, np.uint8) for _ in range(self.workload.tensors)]
        fill(tensors, seed)
        for index, block in enumerate(self.workload.src_blocks.tolist()):
            cache = self._publish(index)
            for view, tensor in zip(tensor_views(cache), tensors, strict=True):
                view[0] = tensor[block]
            self._datadist.cache_manager.deallocate_cache(cache)

    def transfer_one(self, index: int) -> None:
        key, row = self._steps[index]
        self._datadist.cache_manager.pull_cache(key, self._cache, row)

    def verify(self, seed: int) -> bool:
        """Compare the pulled bytes; at the source, check that every key is consumed."""
        if self.role is Role.SOURCE:
            self._wait_until_consumed()
        return super().verify(seed)

    def _wait_until_consumed(self) -> None:
        """Wait until no key is bound: a pull may return earlier."""
        deadline = time.monotonic() + _CONSUMED_S
        while keys := len(self._datadist.statistics().keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{keys} keys are still bound after they were pulled")
            time.sleep(_LOOK_AGAIN_S)

    def _publish(self, index: int) -> Cache:
        return self._datadist.cache_manager.allocate_cache(self._desc(1), [CacheKey(CLUSTER[Role.SOURCE], index)])

    def _desc(self, rows: int) -> CacheDesc:
        return CacheDesc(self.workload.tensors, [rows, self.workload.block_bytes], DataType.DT_UINT8)

    def _open(self, role: Role) -> LLMDataDist:
        # At the source each block is its own allocation, rounded up to pages.
        one = pool_bytes_for(self.workload.block_bytes, self.workload.tensors) * self.workload.blocks
        size = one if role is Role.SOURCE else pool_bytes_for(self.workload.tensor_bytes, self.workload.tensors)
        return open_instance(role, self.workload, self.transport, pool_bytes=size, accessible=False)
