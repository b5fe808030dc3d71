"""NVIDIA's driver, called directly: one copy of everything, the limit; a copy for each block; a batch of all.

Its best settings, and why: block after block lies in one piece of memory, and memory of the host is pinned; addresses
are prepared. The loop runs in Python, where a call costs about 0.3 us more than in C.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec
import numpy as np

from llm_datadist.tools.bench import cuda
from llm_datadist.tools.bench.contenders.base import Contender, Facts, Role, exchange
from llm_datadist.tools.bench.contenders.limits import RawBlocks
from llm_datadist.tools.bench.workload import BESIDE_GPU, BenchMemory, BenchWorkload, Op, mirrors, verify_front

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llm_datadist.tools.bench.workload import Bytes

__all__ = ["CudaBatch", "CudaCopy", "CudaLoop"]

_BATCH: Final = "cuMemcpyBatchAsync"


def _pinned(nbytes: int) -> NDArray[np.uint8]:
    """Return new memory of the host that the driver has pinned."""
    cuda.call("cuMemAllocHost_v2", byref(at := c_void_p()), c_size_t(nbytes))
    return np.ctypeslib.as_array((c_ubyte * nbytes).from_address(at.value or 0))


class CudaCopy(Contender):
    """One cuMemcpyAsync of as many bytes, contiguous at both sides, in one process; memory of the host is pinned."""

    ops: ClassVar[tuple[Op, ...]] = (*BESIDE_GPU, Op.SWAP, Op.PULL, Op.PUSH)
    roles: ClassVar[tuple[Role, ...]] = (Role.ALONE,)
    memories: ClassVar[tuple[BenchMemory, ...]] = (BenchMemory.GPU,)

    def __init__(self, role: Role, workload: BenchWorkload) -> None:
        """Take the workload as one tensor: a block after the other, and the next tensor's after them."""
        blocks = workload.blocks * workload.tensors
        super().__init__(role, msgspec.structs.replace(workload, blocks=blocks, tensors=1))

    def start(self) -> Facts:
        """Make one tensor for each side."""
        op = self.workload.op
        self._of, self.source_views = self._memory(in_host=op is Op.H2D)
        self._to, self.destination_views = self._memory(in_host=op in (Op.D2H, Op.SWAP))
        return {"transport": "local"}

    def _memory(self, *, in_host: bool) -> tuple[int, list[Bytes]]:
        """Return the address of the tensor, and the array for it."""
        if in_host:
            memory = _pinned(self.workload.tensor_bytes).reshape(self.workload.rows, self.workload.block_bytes)
            return memory.ctypes.data, [memory]
        base = cuda.allocate(self.workload.tensor_bytes)
        return base, mirrors(self.workload, [base])

    def transfer(self) -> None:
        cuda.copy([(c_uint64(self._to), c_uint64(self._of))], self.workload.nbytes)

    def verify(self, seed: int) -> bool:
        """Compare the front of the destination, which came in the source's order."""
        exchange(self.destination_views, send=False)
        verify_front(self.destination_views, self.workload, seed)
        return True


class CudaLoop(CudaCopy):
    """A cuMemcpyAsync for each block, then one wait."""

    verify = Contender.verify

    def start(self) -> Facts:
        """Prepare the addresses of all blocks."""
        facts, here = super().start(), self.workload
        self._dst, self._src = (
            RawBlocks.at([base], here.block_bytes, numbers).addresses
            for base, numbers in ((self._to, here.dst_blocks), (self._of, here.src_blocks))
        )
        pairs = zip(self._dst.tolist(), self._src.tolist(), strict=True)
        self._pairs = [(c_uint64(dst), c_uint64(src)) for dst, src in pairs]
        return facts

    def transfer(self) -> None:
        cuda.copy(self._pairs, self.workload.block_bytes)


class _Attributes(Structure):
    """CUmemcpyAttributes: the order of accesses to sources, hints of location, flags."""

    _fields_ = [("order", c_int), ("src", c_int * 2), ("dst", c_int * 2), ("flags", c_int)]


class CudaBatch(CudaLoop):
    """One cuMemcpyBatchAsync of all blocks: the function of CUDA 12.8, which later drivers export by this name."""

    @classmethod
    def why_not(cls, workload: BenchWorkload) -> str | None:
        """Refuse where the driver has no such function, too."""
        return super().why_not(workload) or cuda.why_not(_BATCH)

    def start(self) -> Facts:
        """Prepare the sizes, too."""
        facts = super().start()
        self._sizes = np.full(len(self._dst), self.workload.block_bytes, np.uint64)
        return facts

    def transfer(self) -> None:
        """Name one set of attributes for all, from copy 0 on: sources are read in the stream's order."""
        to, of, sizes = (c_void_p(each.ctypes.data) for each in (self._dst, self._src, self._sizes))
        count, attributes, first, failed = c_size_t(len(self._dst)), _Attributes(1), c_size_t(0), c_size_t()
        kinds = byref(attributes), byref(first), c_size_t(1)
        cuda.call(_BATCH, to, of, sizes, count, *kinds, byref(failed), cuda.stream())
        cuda.call("cuStreamSynchronize", cuda.stream())
