"""Memory straight from a device, one segment per cache: what v1 mode does without a pool (R12)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from llm_datadist.errors import OutOfMemory, ParamError, StateError
from llm_datadist.log import logger
from llm_datadist.memory.host import host_memory_limit
from llm_datadist.memory.pool import Allocation, MemoryPool, PoolStatistics
from llm_datadist.memory.segment import SharedSegment

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist.memory.device import Device
    from llm_datadist.memory.segment import Segment

__all__ = ["DirectMemory"]

_PAGE_SHIFT: Final = 12
_PAGE: Final = 1 << _PAGE_SHIFT

#: What somebody in this process was still using at the end: mapped until the process ends, because unmapping it under
#: a reader would end the process.
_kept_mapped: list[NDArray[np.uint8]] = []


class DirectMemory:
    """Takes a segment from the device for every allocation and gives it back with it. Any thread.

    It stands where a :class:`MemoryPool` would, and each segment is a pool of its own that is used once, so that
    freeing and quarantine are the pools'. The segments are made after linking and not exported: peers reach them as
    private memory.

    Args:
        name: For messages.
        device: Where the memory comes from.
        limit: Gives the most bytes this process may use, and what sets that limit.
    """

    def __init__(self, name: str, device: Device, *, limit: Callable[[], tuple[int, str]] = host_memory_limit) -> None:
        self.name = name
        self._device = device
        self._limit = limit
        self._lock = threading.Lock()  # guards the four below
        self._pools: set[_OneUsePool] = set()
        self._taken = 0
        self._peak = 0
        self._closed = False

    def allocate_many(self, count: int, nbytes: int) -> Allocation:
        """Take ``count`` tensors of ``nbytes`` bytes each, in whole pages: all of them, or none.

        Raises:
            ParamError: ``count`` or ``nbytes`` is not positive.
            OutOfMemory: More than this host or its cgroup has, with what is taken already; or the device refuses.
            StateError: Closed.
        """
        if count <= 0 or nbytes <= 0:
            raise ParamError(f"memory {self.name}: count {count} and nbytes {nbytes} must both be positive")
        wanted = count * -(-nbytes // _PAGE) * _PAGE
        self._reserve(wanted)
        try:
            segment = self._device.allocate(wanted, self.name, peers_may_write=False, prefault=False)
            pool = _OneUsePool(self, segment)
        except BaseException:
            with self._lock:
                self._taken -= wanted
            raise
        if isinstance(segment, SharedSegment):
            segment.close_descriptor()  # nobody is given it
        with self._lock:
            self._pools.add(pool)
            self._peak = max(self._peak, self._taken)
        return pool.allocate_many(count, nbytes)

    def _reserve(self, wanted: int) -> None:
        most, source = self._limit()
        with self._lock:
            if self._closed:
                raise StateError(f"memory {self.name} is closed: nothing can be allocated")
            free = max(0, most - self._taken)
            if wanted <= free:
                self._taken += wanted
                return
        raise OutOfMemory(
            f"memory {self.name}: {wanted} bytes are wanted and {most - free} taken, of the {most} bytes of {source}; "
            "free caches",
            pool=self.name,
            requested=wanted,
            free=free,
            largest_hole=free,
            quarantined=self.statistics().quarantined_bytes,
        )

    def _give_back(self, pool: _OneUsePool) -> None:
        with self._lock:
            if pool in self._pools:
                self._pools.remove(pool)
                self._taken -= pool.segment.nbytes

    def statistics(self) -> PoolStatistics:
        """Return the figures at this moment, as a pool's; what is free is what the last look at the host said."""
        with self._lock:
            pools, taken, peak = list(self._pools), self._taken, self._peak
        return PoolStatistics(
            name=self.name,
            capacity_bytes=taken,
            used_bytes=taken,
            free_bytes=0,
            largest_hole_bytes=0,
            live_allocations=sum(pool.statistics().live_allocations for pool in pools),
            page_bytes=_PAGE,
            peak_used_bytes=peak,
            quarantined_bytes=sum(pool.statistics().quarantined_bytes for pool in pools),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when the segments and what is counted differ, or one of them contradicts itself."""
        with self._lock:
            pools, taken = list(self._pools), self._taken
        for pool in pools:
            pool.check_integrity()
        mapped = sum(pool.segment.nbytes for pool in pools)
        if mapped > taken:
            raise AssertionError(f"memory {self.name}: {mapped} bytes are mapped, {taken} counted")

    def close(self) -> None:
        """Allocate no more. What is still allocated now is in use, and stays mapped. Idempotent."""
        with self._lock:
            self._closed = True
            pools, self._pools = list(self._pools), set()
        for pool in pools:
            _kept_mapped.append(pool.segment.view())
            pool.close()
        if pools:
            logger.warning("memory %s: %d caches are in use at the end and stay mapped", self.name, len(pools))

    def __repr__(self) -> str:
        return f"<DirectMemory {self.name}: {len(self._pools)} segments, {self._taken} bytes>"


class _OneUsePool(MemoryPool):
    """A pool over one segment for one allocation; freeing that gives the segment back."""

    def __init__(self, owner: DirectMemory, segment: Segment) -> None:
        super().__init__(owner.name, segment, _PAGE_SHIFT)
        self._owner = owner

    def _free(self, allocation: Allocation) -> None:
        super()._free(allocation)
        self._owner._give_back(self)
        self.close()
