"""Memory of contenders that bring none of their own."""

from __future__ import annotations

import mmap

import numpy as np

from llm_datadist.bench.workload import BenchMemory, BenchWorkload, Bytes


def private_tensors(workload: BenchWorkload) -> list[Bytes]:
    """Return the workload's tensors, shape (rows, block_bytes), in private pages of the usual size.

    NumPy would use huge pages, which move at another speed.
    """
    return _tensors(workload, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def tensors_like(workload: BenchWorkload) -> list[Bytes]:
    """Return the workload's tensors in its kind of pages: shared for a pool, else private."""
    if workload.memory is BenchMemory.POOL:
        return _tensors(workload, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    return private_tensors(workload)


def _tensors(workload: BenchWorkload, flags: int) -> list[Bytes]:
    shape = (workload.rows, workload.block_bytes)
    pages = (mmap.mmap(-1, workload.tensor_bytes, flags=flags) for _ in range(workload.tensors))
    return [np.frombuffer(each, np.uint8).reshape(shape) for each in pages]
