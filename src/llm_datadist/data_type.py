"""Older import path: element types (interface R23)."""

from llm_datadist.types.data_type import DataType, canonical_type, dtype_to_np_dtype, np_dtype_to_dtype, valid_np_dtypes

__all__ = ["DataType", "canonical_type", "dtype_to_np_dtype", "np_dtype_to_dtype", "valid_np_dtypes"]
