"""Element types of tensors, and their types in NumPy and torch (interface §1.2)."""

from __future__ import annotations

import sys
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from llm_datadist._checks import type_error
from llm_datadist.errors import ParamError

if TYPE_CHECKING:
    import torch


class TorchDtype(Protocol):
    """``torch.dtype`` for type checkers, also where torch is not installed."""

    is_signed: bool


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

# NumPy has no bfloat16: its bits as uint16. Text has no array type.
_NUMPY: Final = dtype_to_np_dtype | {DataType.DT_BF16: np.uint16}
del _NUMPY[DataType.DT_STRING]

#: Names in NumPy, ml_dtypes and torch; reversed, so that uint16 is not DT_BF16. Of 8-bit floats caches know the bits.
_NAMES: Final = {np.dtype(scalar).name: each for each, scalar in reversed(_NUMPY.items())}
_NAMES["bfloat16"] = DataType.DT_BF16
_NAMES.update((f"float8_{each}", DataType.DT_UINT8) for each in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"))
_ALIASES: Final = {"bool_": "bool", "longlong": "int64", "ulonglong": "uint64"}  # NumPy's, of scalar types

Dtype = DataType | np.dtype[Any] | type[np.generic] | TorchDtype


def data_type_of(name: str, dtype: Dtype) -> DataType:
    """Return the element type of a NumPy dtype, NumPy scalar type, torch dtype or DataType. An extension.

    TypeError, naming ``name``: none of these, such as a text. ParamError: a type or byte order that caches lack.
    """
    if isinstance(dtype, DataType):
        return dtype
    if isinstance(dtype, np.dtype):
        known = dtype.name if dtype.isnative else ""
    elif isinstance(dtype, type) and issubclass(dtype, np.generic):
        known = _ALIASES.get(dtype.__name__, dtype.__name__)
    elif isinstance(dtype, getattr(sys.modules.get("torch"), "dtype", ())):  # not imported: who has one has done so
        known = str(dtype).removeprefix("torch.")
    else:
        raise type_error(name, dtype, (DataType, np.dtype))
    if known not in _NAMES:
        raise ParamError(f"{name}={dtype}: not an element type of caches in native byte order: {', '.join(_NAMES)}")
    return _NAMES[known]


def numpy_type(name: str, data_type: DataType) -> type[np.generic]:
    """Return the NumPy type of an element type; ParamError naming ``name`` for text."""
    if (dtype := _NUMPY.get(data_type)) is None:
        raise ParamError(f"{name}={data_type.name}: NumPy has no such element type")
    return dtype


def torch_type(name: str, data_type: DataType) -> torch.dtype:
    """Return the torch dtype of an element type; ParamError naming ``name`` if torch has none. Imports torch."""
    import torch

    known = "bfloat16" if data_type is DataType.DT_BF16 else np.dtype(numpy_type(name, data_type)).name
    if not isinstance(dtype := getattr(torch, known, None), torch.dtype):
        raise ParamError(f"{name}={data_type.name}: this version of torch has no {known}")
    return dtype
