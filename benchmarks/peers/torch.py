"""PyTorch on the CPU: ``index_copy_`` of blocks, as code that keeps a paged cache in tensors does it.

Its best settings, and why: rows as 64-bit elements where the size of a block allows it, because its kernels go element
by element; the gathered blocks go to memory that is kept, because new memory would be touched for the first time in
every transfer; as many threads as the workload has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from llm_datadist.bench.contenders import why_not_importable
from llm_datadist.bench.contenders.base import Contender, Facts, Role
from llm_datadist.bench.workload import BenchWorkload, Op, tensors_like

if TYPE_CHECKING:
    from llm_datadist.bench.workload import Bytes

__all__ = ["Torch"]

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


def _elements(view: Bytes) -> np.ndarray[Any, np.dtype[Any]]:
    return view.view(_ELEMENT) if view.shape[1] % _ELEMENT.itemsize == 0 else view
