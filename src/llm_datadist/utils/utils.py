"""Older import path: argument checks (interface R23)."""

from llm_datadist._checks import (
    check_int32 as check_int32,
    check_int64 as check_int64,
    check_uint8 as check_uint8,
    check_uint16 as check_uint16,
    check_uint32 as check_uint32,
    check_uint64 as check_uint64,
)
from llm_datadist.compat import (
    check_dict as check_dict,
    check_isinstance as check_isinstance,
    check_list_int32 as check_list_int32,
    check_list_int64 as check_list_int64,
    check_list_uint8 as check_list_uint8,
    check_list_uint16 as check_list_uint16,
    check_list_uint32 as check_list_uint32,
    check_list_uint64 as check_list_uint64,
    check_positive_or_set_default as check_positive_or_set_default,
)
