"""What native code executes: a copy in factored form, and the memory of one end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_datadist.native._native import BlockList, Plan, TensorList

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BlockList", "Plan", "Tensors"]


@dataclass(slots=True, eq=False)
class Tensors:
    """The tensors of one end, as mapped in this process. Not to be changed, but not frozen either: that would double
    the time to make one, which is on the path of every pull by key.

    Attributes:
        bases: Shape ``(T,)``: address of each tensor. Native code has its own copy.
        extent: Bytes of each tensor; every run must end inside it.
        mapped: Nobody but this library can unmap or protect that memory, so that native code may write it on behalf of
            a peer by itself. Elsewhere it lets the kernel do it, which fails where we would crash.
        native: The two, as native code takes them.
    """

    bases: NDArray[np.uint64]
    extent: int
    mapped: bool = field(default=False, kw_only=True)
    native: TensorList = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.native = TensorList(self.bases, self.extent)
