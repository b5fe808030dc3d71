"""What native code executes: a copy in factored form, and the memory of one end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_datadist.native._native import BlockList, Plan, TensorList

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BlockList", "Plan", "Tensors"]


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of one end, as mapped in this process.

    Attributes:
        bases: Shape ``(T,)``: address of each tensor. Not to be changed: native code has its own copy.
        extent: Bytes of each tensor; every run must end inside it.
        native: The two, as native code takes them.
    """

    bases: NDArray[np.uint64]
    extent: int
    native: TensorList = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "native", TensorList(self.bases, self.extent))
