"""A tensor as torch makes them, for tests in an environment without torch."""

from collections.abc import Iterator
from typing import Any

import numpy as np


class Tensor:
    """Numbers behind ``numpy()``, or a tensor that it refuses, as torch does for those of a GPU."""

    def __init__(self, numbers: Any, device: str = "cpu") -> None:
        self.array, self.device, self.layout = np.asarray(numbers), device, "torch.strided"
        self.dtype = f"torch.{self.array.dtype}"

    def numpy(self) -> np.ndarray[Any, Any]:
        if self.device != "cpu":
            raise TypeError(f"can't convert {self.device} device type tensor to numpy")
        return self.array

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def __iter__(self) -> "Iterator[Tensor]":
        return map(Tensor, self.array)

    def __index__(self) -> int:
        if self.array.size != 1 or self.array.dtype.kind not in "iu":
            raise TypeError("only integer tensors of a single element can be converted to an index")
        return int(self.array.reshape(-1)[0])

    def __repr__(self) -> str:
        return f"tensor({self.array.tolist()})"


class Parameter(Tensor):
    """A tensor of a derived class."""


Tensor.__module__ = "torch"
