"""Copies of NVIDIA's driver as contenders, without this library's engine: one of everything, one a block, and a batch.

Host memory of h2d, d2h and swap is pinned.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_int, c_size_t, c_uint64, c_void_p
from typing import ClassVar, Final

import msgspec
import numpy as np

from llm_datadist.bench import cuda
from llm_datadist.bench import workload as work
from llm_datadist.bench.contenders.base import Contender, Facts, Role, exchange
from llm_datadist.bench.contenders.limits import RawBlocks
from llm_datadist.bench.workload import BESIDE_GPU, BenchMemory, BenchWorkload, Bytes, Op

_BATCH: Final = "cuMemcpyBatchAsync"


class CudaLoop(Contender):
    """A cuMemcpyAsync for each block, inside one process; then one wait."""

    ops: ClassVar[tuple[Op, ...]] = (*BESIDE_GPU, Op.SWAP, Op.PULL, Op.PUSH)
    roles: ClassVar[tuple[Role, ...]] = (Role.ALONE,)
    memories: ClassVar[tuple[BenchMemory, ...]] = (BenchMemory.GPU,)

    def start(self) -> Facts:
        here = self.workload
        self._stream = cuda.Stream()
        self.source_views, of = self._memory(in_host=here.op is Op.H2D)
        self.destination_views, to = self._memory(in_host=here.op in (Op.D2H, Op.SWAP))
        self._of, self._to = (
            RawBlocks.elsewhere(bases, here.rows, here.block_bytes, numbers).addresses
            for bases, numbers in ((of, here.src_blocks), (to, here.dst_blocks))
        )
        self._beginning = c_uint64(to[0]), c_uint64(of[0])
        self._pairs = [
            (c_uint64(to), c_uint64(of)) for to, of in zip(self._to.tolist(), self._of.tolist(), strict=True)
        ]
        return {"transport": "local"}

    def _memory(self, *, in_host: bool) -> tuple[list[Bytes], list[int]]:
        """Return tensors in one piece of memory, and their addresses."""
        here = self.workload
        starts = range(0, here.tensor_bytes * here.tensors, here.tensor_bytes)
        if in_host:
            memory = cuda.pinned(starts.stop).reshape(here.tensors, here.rows, here.block_bytes)
            return [*memory], [each.ctypes.data for each in memory]
        base = cuda.allocate(starts.stop)
        addresses = [base + each for each in starts]
        return work.mirrors(here, addresses), addresses

    def transfer(self) -> None:
        self._stream.copy(self._pairs, self.workload.block_bytes)
        self._stream.wait()


class CudaCopy(CudaLoop):
    """One cuMemcpyAsync of as many bytes, contiguous at both sides."""

    def __init__(self, role: Role, workload: BenchWorkload) -> None:
        blocks = workload.blocks * workload.tensors
        super().__init__(role, msgspec.structs.replace(workload, blocks=blocks, tensors=1))

    def transfer(self) -> None:
        self._stream.copy([self._beginning], self.workload.nbytes)
        self._stream.wait()

    def verify(self, seed: int) -> bool:
        exchange(self.destination_views, send=False)
        work.verify_front(self.destination_views, self.workload, seed)
        return True


class _Attributes(Structure):
    """CUmemcpyAttributes: the order of accesses to sources, hints of location, flags."""

    _fields_ = [("order", c_int), ("src", c_int * 2), ("dst", c_int * 2), ("flags", c_int)]


class CudaBatch(CudaLoop):
    """One cuMemcpyBatchAsync of all blocks: the function as of CUDA 12.8, which the driver exports under this name."""

    @classmethod
    def why_not(cls, workload: BenchWorkload) -> str | None:
        return super().why_not(workload) or cuda.why_not(_BATCH)

    def start(self) -> Facts:
        facts = super().start()
        self._sizes = np.full(len(self._to), self.workload.block_bytes, np.uint64)
        return facts

    def transfer(self) -> None:
        to, of, sizes = (c_void_p(each.ctypes.data) for each in (self._to, self._of, self._sizes))
        # One set of attributes for all, from the first copy on: sources are read in the stream's order.
        attributes, first, failed = _Attributes(1), c_size_t(0), c_size_t()
        count, stream = c_size_t(len(self._to)), self._stream
        cuda.call(
            _BATCH, to, of, sizes, count, byref(attributes), byref(first), c_size_t(1), byref(failed), stream.handle
        )
        stream.wait()
