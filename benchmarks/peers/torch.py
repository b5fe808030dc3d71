"""PyTorch: ``index_copy_`` of blocks, as code that keeps a paged cache in tensors does it.

Its best settings, and why: rows as 64-bit elements where the size of a block allows it, because its kernels go element
by element; the gathered blocks go to memory that is kept, because new memory would be touched for the first time in
every transfer; as many threads as the workload has. Beside a GPU, gathered blocks of the host are pinned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from llm_datadist.tools.bench.contenders import why_not_importable
from llm_datadist.tools.bench.contenders.base import Contender, Facts, Role
from llm_datadist.tools.bench.workload import BESIDE_GPU, BenchMemory, BenchWorkload, Op, mirrors, tensors_like

if TYPE_CHECKING:
    from llm_datadist.tools.bench.workload import Bytes

__all__ = ["Torch", "TorchGpu"]

_ELEMENT: Final = np.dtype(np.int64)


class Torch(Contender):
    """index_select of the source's blocks, index_copy_ into the destination, inside one process."""

    ops: ClassVar[tuple[Op, ...]] = (Op.COPY, Op.SWAP)
    roles: ClassVar[tuple[Role, ...]] = (Role.ALONE,)

    @classmethod
    def why_not(cls, workload: BenchWorkload) -> str | None:
        """Refuse where PyTorch is not installed, too."""
        return super().why_not(workload) or why_not_importable("torch", "torch==2.13.0")

    @classmethod
    def footprint(cls, workload: BenchWorkload) -> int:
        """The tensors, and the gathered blocks of one of them."""
        copies = 1 if workload.op is Op.COPY else 2
        return copies * workload.tensor_bytes * workload.tensors + workload.blocks * workload.block_bytes

    def start(self) -> Facts:
        """Make source and destination, for a copy the same tensors, and a buffer for gathered blocks."""
        import torch

        here = self.workload
        torch.set_num_threads(here.threads)
        self.source_views = tensors_like(here)
        self.destination_views = self.source_views if here.op is Op.COPY else tensors_like(here)
        self._pairs = [
            (torch.from_numpy(_elements(dst)), torch.from_numpy(_elements(src)))
            for dst, src in zip(self.destination_views, self.source_views, strict=True)
        ]
        self._dst, self._src = torch.from_numpy(here.dst_blocks), torch.from_numpy(here.src_blocks)
        first = self._pairs[0][0]
        self._gathered = torch.empty((here.blocks, first.shape[1]), dtype=first.dtype)
        self._select = torch.index_select
        return {"transport": "local"}

    def transfer(self) -> None:
        for dst, src in self._pairs:
            self._select(src, 0, self._src, out=self._gathered)
            dst.index_copy_(0, self._dst, self._gathered)


class TorchGpu(Torch):
    """The same within a GPU; beside one, blocks are gathered where they lie, then one ``copy_``. Never run on a GPU.

    Host memory is pinned.
    """

    ops: ClassVar[tuple[Op, ...]] = (*BESIDE_GPU, Op.SWAP)
    memories: ClassVar[tuple[BenchMemory, ...]] = (BenchMemory.GPU,)
    device: ClassVar[str] = "cuda"

    def start(self) -> Facts:
        """Make source and destination, and a buffer for gathered blocks beside each."""
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch cannot use CUDA here")
        self._torch, here = torch, self.workload
        places = {Op.D2D: (True, True), Op.H2D: (False, True)}.get(here.op, (True, False))
        self._on_gpu = places[1]
        sides = [self._side(on_gpu=each) for each in places]
        if here.op is Op.D2D:
            sides[1] = sides[0]
        (src, self.source_views, self._gathered), (dst, self.destination_views, self._landed) = sides
        self._pairs = list(zip(dst, src, strict=True))
        numbers = here.src_blocks, here.dst_blocks
        self._src, self._dst = (
            torch.from_numpy(each).to(tensors[0].device) for each, tensors in zip(numbers, (src, dst), strict=True)
        )
        return {"transport": "local"}

    def _side(self, *, on_gpu: bool) -> tuple[list[Any], list[Bytes], Any]:
        """Return tensors, arrays of the bench for them, and a buffer beside them."""
        here = self.workload
        wide = here.block_bytes % _ELEMENT.itemsize == 0
        columns = here.block_bytes // _ELEMENT.itemsize if wide else here.block_bytes
        kind = self._torch.int64 if wide else self._torch.uint8

        def make(rows: int) -> Any:  # noqa: ANN401
            if on_gpu:
                return self._torch.empty((rows, columns), dtype=kind, device=self.device)
            return self._torch.empty((rows, columns), dtype=kind, pin_memory=self.device == "cuda")

        tensors = [make(here.rows) for _ in range(here.tensors)]
        if on_gpu and self.device == "cuda":
            return tensors, mirrors(here, [each.data_ptr() for each in tensors]), make(here.blocks)
        return tensors, [each.numpy().view(np.uint8) for each in tensors], make(here.blocks)

    def transfer(self) -> None:
        """Move tensor after tensor; the host waits before it reads what came, and at the end."""
        for dst, src in self._pairs:
            self._torch.index_select(src, 0, self._src, out=self._gathered)
            if self._landed is not self._gathered:
                self._landed.copy_(self._gathered, non_blocking=True)
            if not self._on_gpu:
                self._synchronize()
            dst.index_copy_(0, self._dst, self._landed)
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device == "cuda":
            self._torch.cuda.synchronize()


def _elements(view: Bytes) -> np.ndarray[Any, np.dtype[Any]]:
    return view.view(_ELEMENT) if view.shape[1] % _ELEMENT.itemsize == 0 else view
