"""Layer 2, memory: segments of bytes, pools over them, devices they come from, guards over what they hold."""

from __future__ import annotations

from llm_datadist._memory.allocator import PageAllocator
from llm_datadist._memory.device import Device, HostDevice
from llm_datadist._memory.guards import SLOT_BYTES, Guard, GuardTable, read_cookie, slot_address
from llm_datadist._memory.host import host_memory_limit
from llm_datadist._memory.pool import Allocation, MemoryPool, PoolStatistics, create_pool
from llm_datadist._memory.segment import ExternalSegment, Segment, SharedSegment

__all__ = [
    "SLOT_BYTES",
    "Allocation",
    "Device",
    "ExternalSegment",
    "Guard",
    "GuardTable",
    "HostDevice",
    "MemoryPool",
    "PageAllocator",
    "PoolStatistics",
    "Segment",
    "SharedSegment",
    "create_pool",
    "host_memory_limit",
    "read_cookie",
    "slot_address",
]
