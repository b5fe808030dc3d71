"""Older import path: argument checks (interface R23)."""

from llm_datadist._checks import check_int32, check_int64, check_uint8, check_uint16, check_uint32, check_uint64
from llm_datadist.compat import (
    check_dict,
    check_isinstance,
    check_list_int32,
    check_list_int64,
    check_list_uint8,
    check_list_uint16,
    check_list_uint32,
    check_list_uint64,
    check_positive_or_set_default,
)

__all__ = [
    "check_dict",
    "check_int32",
    "check_int64",
    "check_isinstance",
    "check_list_int32",
    "check_list_int64",
    "check_list_uint8",
    "check_list_uint16",
    "check_list_uint32",
    "check_list_uint64",
    "check_positive_or_set_default",
    "check_uint8",
    "check_uint16",
    "check_uint32",
    "check_uint64",
]
