"""Element types of tensors, and their NumPy types (interface §1.2)."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import numpy as np


class DataType(Enum):
    """Element type of a tensor.

    Source: interface §1.2.
    """

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_STRING = 13
    DT_BF16 = 27

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        # A string element is two 8-byte words (address, length), unlike NumPy's bytes type.
        return 16 if self is DataType.DT_STRING else np.dtype(dtype_to_np_dtype[self]).itemsize


dtype_to_np_dtype: Final[dict[DataType, type[np.generic]]] = {
    DataType.DT_FLOAT: np.float32,
    DataType.DT_FLOAT16: np.float16,
    DataType.DT_INT8: np.int8,
    DataType.DT_INT32: np.int32,
    DataType.DT_UINT8: np.uint8,
    DataType.DT_INT16: np.int16,
    DataType.DT_UINT16: np.uint16,
    DataType.DT_UINT32: np.uint32,
    DataType.DT_INT64: np.int64,
    DataType.DT_UINT64: np.uint64,
    DataType.DT_DOUBLE: np.float64,
    DataType.DT_BOOL: np.bool_,
    DataType.DT_STRING: np.bytes_,
    # NumPy has no bfloat16: the size is right, the values are not.
    DataType.DT_BF16: np.float16,
}
"""NumPy scalar type of each element type (14 entries)."""


def canonical_type(dtype: np.dtype[Any]) -> type[np.generic]:
    """Return one scalar type for all dtypes with these bits; NumPy has two for int64."""
    scalar: type[np.generic] = np.dtype(dtype.str).type
    return scalar


class _ByScalarType(dict[Any, DataType]):
    """Element types by scalar type (``np.float32``), or by an array's ``np.dtype``."""

    def __missing__(self, key: object) -> DataType:
        if isinstance(key, np.dtype) and (scalar := canonical_type(key)) in self:
            return self[scalar]
        raise KeyError(key)


np_dtype_to_dtype: Final[dict[Any, DataType]] = _ByScalarType(
    {scalar: dtype for dtype, scalar in dtype_to_np_dtype.items() if dtype is not DataType.DT_BF16}
)
"""Element type of each NumPy scalar type (13 entries; NumPy has no bfloat16)."""

valid_np_dtypes: Final[list[type[np.generic]]] = list(np_dtype_to_dtype)
"""NumPy scalar types with an element type."""
