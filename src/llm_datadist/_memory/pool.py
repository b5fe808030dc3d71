"""Pools: a segment with an allocator, and memory straight from a device without a pool.

Threads: any; each pool has one lock. An allocation that raises leaves the pool unchanged.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from llm_datadist._checks import require_intact
from llm_datadist._log import logger
from llm_datadist._memory.allocator import PageAllocator
from llm_datadist._memory.segment import Segment, SharedSegment
from llm_datadist.errors import OutOfMemory, StateError
from llm_datadist.metrics import PoolStatistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist._memory.device import Device
    from llm_datadist._option_kinds import PoolOptions

_DIRECT_PAGE: Final = 4096

#: Memory in use when its :class:`DirectMemory` was closed. It stays mapped: unmapping it under a reader would crash the
#: process.
kept_mapped: list[object] = []


class Allocation:
    """Equal tensors in a pool, allocated and freed together. Its addresses are valid until then, or the pool's end."""

    __slots__ = ("addresses", "detained", "freed", "nbytes", "offsets", "pool", "segment")

    def __init__(self, pool: MemoryPool | DirectMemory, segment: Segment, offsets: Sequence[int], nbytes: int) -> None:
        base = segment.address
        self.pool = pool
        self.segment = segment
        self.offsets = offsets
        self.addresses = tuple([base + offset for offset in offsets])
        self.nbytes = nbytes  # requested, per tensor
        self.freed = False
        self.detained = 0  # bytes in quarantine, in whole pages

    def free(self) -> None:
        """Give all tensors back to the pool, even a closed one. Idempotent."""
        self.pool.free(self)


class MemoryPool:
    """Allocator over a segment, which it owns. Only arithmetic happens under its lock."""

    def __init__(self, name: str, segment: Segment, page_shift: int, device: str = "host") -> None:
        self.name = name
        self._device = device
        self.segment = segment
        self._lock = threading.Lock()  # protects the three below and the state of allocations
        self._allocator = PageAllocator(segment.nbytes, page_shift)
        self._peak_used = 0
        self._quarantined = 0

    def allocate_many(self, count: int, nbytes: int) -> Allocation:
        """Take ``count`` tensors of ``nbytes`` bytes each; raise OutOfMemory, and take none, if they do not fit."""
        offsets: list[int] = []
        found: Allocation | None = None
        with self._lock:
            if self.segment.closed:
                raise StateError(f"pool {self.name} is closed: nothing can be allocated")
            try:
                while len(offsets) < count and (offset := self._allocator.allocate(nbytes)) is not None:
                    offsets.append(offset)
                if len(offsets) == count:
                    found = Allocation(self, self.segment, tuple(offsets), nbytes)
                    self._peak_used = max(self._peak_used, self._allocator.used_bytes)
            finally:
                if found is None:
                    for each in offsets:
                        self._allocator.free(each)
            if found is None:
                raise self._shortage(count, nbytes)
        return found

    def statistics(self) -> PoolStatistics:
        with self._lock:
            allocator = self._allocator
            return PoolStatistics(
                name=self.name,
                capacity_bytes=allocator.capacity,
                used_bytes=allocator.used_bytes,
                free_bytes=allocator.free_bytes,
                largest_hole_bytes=allocator.largest_hole,
                live_allocations=allocator.live,
                page_bytes=allocator.page_bytes,
                peak_used_bytes=self._peak_used,
                quarantined_bytes=self._quarantined,
                device=self._device,
            )

    def check_integrity(self) -> None:
        with self._lock:
            self._allocator.check_integrity()
            used = self._allocator.used_bytes
            require_intact(0 <= self._quarantined <= used, f"{self._quarantined} of {used} used bytes are quarantined")
            require_intact(self._peak_used >= used, f"peak {self._peak_used} is below the used {used} bytes")

    def close(self) -> None:
        """Close the segment; allocations are refused from then on. Idempotent."""
        self.segment.close()

    def free(self, allocation: Allocation) -> None:
        with self._lock:
            if allocation.freed:
                return
            allocation.freed = True
            self._quarantined -= allocation.detained
            allocation.detained = 0
            for offset in allocation.offsets:
                self._allocator.free(offset)

    def detain(self, allocation: Allocation) -> None:
        """Count the allocation as quarantined until it is freed."""
        with self._lock:
            if not allocation.freed and not allocation.detained:
                allocation.detained = len(allocation.offsets) * self._allocator.rounded(allocation.nbytes)
                self._quarantined += allocation.detained

    def _shortage(self, count: int, nbytes: int) -> OutOfMemory:
        free, hole = self._allocator.free_bytes, self._allocator.largest_hole
        requested = count * self._allocator.rounded(nbytes)
        return OutOfMemory(
            f"pool {self.name} cannot hold {count} x {nbytes} bytes: requested {requested} bytes in whole pages of "
            f"{self._allocator.page_bytes}, free {free}, largest hole {hole}, capacity {self._allocator.capacity}; "
            "free caches or enlarge the pool",
            pool=self.name,
            requested=requested,
            free=free,
            largest_hole=hole,
            quarantined=self._quarantined,
        )


def create_pool(name: str, device: Device, sizes: PoolOptions, *, peers_may_write: bool, prefault: bool) -> MemoryPool:
    """Create a pool; OutOfMemory if this process cannot have that many bytes (interface R11)."""
    nbytes, huge_pages = sizes.memory_size, sizes.huge_pages
    device.require(f"pool {name}", nbytes)
    segment = device.allocate(nbytes, name, peers_may_write=peers_may_write, prefault=prefault, huge_pages=huge_pages)
    return MemoryPool(name, segment, sizes.page_shift, device.name)


class DirectMemory:
    """Substitute for a :class:`MemoryPool`: a segment for each allocation, which peers see as non-pool memory."""

    def __init__(self, name: str, device: Device) -> None:
        self.name = name
        self._device = device
        self._lock = threading.Lock()  # protects the four below and the state of allocations
        self._live: set[Allocation] = set()
        self._taken = 0
        self._peak = 0
        self._closed = False

    def allocate_many(self, count: int, nbytes: int) -> Allocation:
        """Take tensors as :meth:`MemoryPool.allocate_many` does, in whole pages of 4 KiB."""
        each = -(-nbytes // _DIRECT_PAGE) * _DIRECT_PAGE
        wanted = count * each
        self._reserve(wanted)
        try:
            segment = self._device.allocate(wanted, self.name, peers_may_write=False, prefault=False)
            allocation = Allocation(self, segment, range(0, wanted, each), nbytes)
        except BaseException:
            with self._lock:
                self._taken -= wanted
            raise
        if isinstance(segment, SharedSegment):
            segment.close_descriptor()  # no peer gets it
        with self._lock:
            self._live.add(allocation)
            self._peak = max(self._peak, self._taken)
        return allocation

    def _reserve(self, wanted: int) -> None:
        most, source = self._device.limit()
        with self._lock:
            if self._closed:
                raise StateError(f"memory {self.name} is closed: nothing can be allocated")
            free = max(0, most - self._taken)
            if wanted <= free:
                self._taken += wanted
                return
        text = (
            f"memory {self.name}: {wanted} bytes are wanted and {most - free} taken, of the {most} bytes of {source}; "
            "free caches"
        )
        held = self.statistics().quarantined_bytes
        raise OutOfMemory(text, pool=self.name, requested=wanted, free=free, largest_hole=free, quarantined=held)

    def free(self, allocation: Allocation) -> None:
        with self._lock:
            if allocation not in self._live:
                return
            self._live.remove(allocation)
            self._taken -= allocation.segment.nbytes
            allocation.freed, allocation.detained = True, 0
        allocation.segment.close()

    def detain(self, allocation: Allocation) -> None:
        with self._lock:
            if allocation in self._live:
                allocation.detained = allocation.segment.nbytes

    def statistics(self) -> PoolStatistics:
        """Return the figures of a full pool."""
        with self._lock:
            return PoolStatistics(
                name=self.name,
                capacity_bytes=self._taken,
                used_bytes=self._taken,
                free_bytes=0,
                largest_hole_bytes=0,
                live_allocations=sum(len(each.offsets) for each in self._live),
                page_bytes=_DIRECT_PAGE,
                peak_used_bytes=self._peak,
                quarantined_bytes=sum(each.detained for each in self._live),
                device=self._device.name,
            )

    def check_integrity(self) -> None:
        with self._lock:
            mapped, taken = sum(each.segment.nbytes for each in self._live), self._taken
        require_intact(mapped <= taken, f"memory {self.name}: {mapped} bytes are mapped, {taken} counted")

    def close(self) -> None:
        """Refuse allocations; keep live ones mapped. Idempotent."""
        with self._lock:
            self._closed = True
            live, self._live = self._live, set()
        for allocation in live:
            kept_mapped.append(allocation.segment.keep())
            allocation.segment.close()
        if live:
            logger.warning("memory %s: %d caches are in use at the end and stay mapped", self.name, len(live))
