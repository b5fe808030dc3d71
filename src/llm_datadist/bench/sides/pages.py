"""Memory for sides that do not bring their own: plain pages, the same for limits, peers and registered caches.

Pages of the usual size: whoever takes huge ones moves the same blocks at another speed, and NumPy asks for them where
it allocates much.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.bench.workload import Memory

if TYPE_CHECKING:
    from llm_datadist.bench.workload import Bytes, Workload

__all__ = ["private_tensors", "shared_tensors", "tensors_like"]

_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_SHARED: Final = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS


def private_tensors(workload: Workload) -> list[Bytes]:
    """Return the workload's tensors, shape (rows, block_bytes), in private pages as a process has by itself."""
    return _tensors(workload, _PRIVATE)


def shared_tensors(workload: Workload) -> list[Bytes]:
    """Return the workload's tensors, shape (rows, block_bytes), in shared pages as a pool has."""
    return _tensors(workload, _SHARED)


def tensors_like(workload: Workload) -> list[Bytes]:
    """Return the workload's tensors in such pages as ``workload.memory`` has."""
    return shared_tensors(workload) if workload.memory is Memory.POOL else private_tensors(workload)


def _tensors(workload: Workload, flags: int) -> list[Bytes]:
    shape = (workload.rows, workload.block_bytes)
    pages = (mmap.mmap(-1, workload.tensor_bytes, flags=flags) for _ in range(workload.tensors))
    return [np.frombuffer(each, np.uint8).reshape(shape) for each in pages]
