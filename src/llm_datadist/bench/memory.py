"""Memory of a comparison: how much it may take now, and the pages of sides that do not bring their own."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist._memory.host import host_memory_limit
from llm_datadist.bench.workload import Memory

if TYPE_CHECKING:
    from llm_datadist.bench.workload import Bytes, Workload

__all__ = ["available_memory", "private_tensors", "tensors_like"]

_USED_FILES: Final = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
_CGROUP: Final = "cgroup limit "
_PROC: Final = Path("/proc")


def available_memory(proc: Path = _PROC) -> tuple[int, str]:
    """Return the bytes that can still be had, and what bounds them.

    The smaller of MemAvailable and what the tightest cgroup has left. Pools are memfds, which the size of /dev/shm does
    not bound.

    Args:
        proc: Where procfs is; a test puts its own files there.
    """
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE)
    free = int(match[1]) * 1024 if match else 0
    limit, source = host_memory_limit(proc)
    if source.startswith(_CGROUP):
        limit_file = Path(source.removeprefix(_CGROUP))
        try:
            used = int((limit_file.parent / _USED_FILES[limit_file.name]).read_text())
        except (OSError, ValueError):
            used = 0
        if limit - used < free:
            return max(0, limit - used), source
    return free, "MemAvailable"


def private_tensors(workload: Workload) -> list[Bytes]:
    """Return the workload's tensors, shape (rows, block_bytes), in private pages of the usual size.

    Not from NumPy, which asks for huge pages where it allocates much: with them the same blocks move at another speed.
    """
    return _tensors(workload, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def tensors_like(workload: Workload) -> list[Bytes]:
    """Return the workload's tensors in pages as ``workload.memory`` has: shared for a pool, else private."""
    if workload.memory is Memory.POOL:
        return _tensors(workload, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    return private_tensors(workload)


def _tensors(workload: Workload, flags: int) -> list[Bytes]:
    shape = (workload.rows, workload.block_bytes)
    pages = (mmap.mmap(-1, workload.tensor_bytes, flags=flags) for _ in range(workload.tensors))
    return [np.frombuffer(each, np.uint8).reshape(shape) for each in pages]
