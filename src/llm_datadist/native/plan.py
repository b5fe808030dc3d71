"""What native code executes: a copy in factored form, and the memory of one end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Plan", "Tensors"]


@dataclass(frozen=True, slots=True)
class Plan:
    """A copy in factored form: tensor pairs times runs, because what is asked of one tensor is asked of all.

    Destination tensor ``dst_first + i`` takes from source tensor ``src_first + i``, for ``i`` below ``count``.

    Attributes:
        dst_first: First tensor of the destination.
        src_first: First tensor of the source.
        count: Tensor pairs.
        runs: Shape ``(R, 3)``, C-contiguous: destination offset, source offset and length in bytes inside a tensor.
            Not to be changed while the plan is executed.
        ordered: True when the runs must take effect one after the other (R26).
        nbytes: Bytes over all tensors: ``count`` times the sum of the lengths.
    """

    dst_first: int
    src_first: int
    count: int
    runs: NDArray[np.uint64]
    ordered: bool
    nbytes: int


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of one end, as mapped in this process.

    Attributes:
        bases: Shape ``(T,)``: address of each tensor.
        extent: Bytes of each tensor; every run must end inside it.
    """

    bases: NDArray[np.uint64]
    extent: int
