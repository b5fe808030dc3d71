"""Enumerations, CacheDesc and Cache: every documented check, the geometry and the text (interface §1.2, §4, §5)."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.data_type import dtype_to_np_dtype, np_dtype_to_dtype, valid_np_dtypes
from llm_datadist.errors import NoneArgument, ParamError
from llm_datadist.types import Cache, CacheDesc, DataType, LLMRole, Memtype, Placement, PushType, RegisterMemStatus

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.covers(
    "Cache",
    "CacheDesc",
    "DataType",
    "LLMRole",
    "Memtype",
    "Placement",
    "PushType",
    "RegisterMemStatus",
    "Registry",
    "dtype_to_np_dtype",
    "np_dtype_to_dtype",
    "valid_np_dtypes",
    "Cache: cache_desc cache_id create_cpu_cache is_blocks_cache tensor_addrs",
    "CacheDesc: batch_dim batch_size data_type kv_tensor_format num_tensors seq_len_dim_index shape size",
    "CacheDesc: update_dim",
    "DataType.itemsize",
)

HALF = DataType.DT_FLOAT16


# --- enumerations --------------------------------------------------------------------------------------------------


def test_r01_a_number_that_no_member_has_is_a_value_error() -> None:
    """The documented members and their values are in test_public_api.py."""
    assert {member.name: member.value for member in PushType} == {
        "NO_CACHE_KEY": 0,
        "BLOCKS_CACHE_KEY": 1,
        "CACHE_KEY_BY_ID": 2,
    }
    every: list[type[Any]] = [LLMRole, Placement, RegisterMemStatus, Memtype, PushType, DataType]
    for enum in every:
        for value in (-1, 5_000, "PROMPT", None, 0.5):
            with pytest.raises(ValueError, match=f"{value!r} is not a valid {enum.__name__}"):
                enum(value)


def test_int_enums_are_ints_with_the_name_as_text() -> None:
    assert str(LLMRole.MIX) == f"{LLMRole.MIX}" == "LLMRole.MIX"
    assert str(Placement.DEVICE) == f"{Placement.DEVICE}" == "Placement.DEVICE"
    assert f"{LLMRole.MIX:d}" == "3"


#: Bytes and numpy type; the codes are in test_public_api.py.
SIZES = {
    DataType.DT_FLOAT: (4, np.float32),
    DataType.DT_FLOAT16: (2, np.float16),
    DataType.DT_INT8: (1, np.int8),
    DataType.DT_INT32: (4, np.int32),
    DataType.DT_UINT8: (1, np.uint8),
    DataType.DT_INT16: (2, np.int16),
    DataType.DT_UINT16: (2, np.uint16),
    DataType.DT_UINT32: (4, np.uint32),
    DataType.DT_INT64: (8, np.int64),
    DataType.DT_UINT64: (8, np.uint64),
    DataType.DT_DOUBLE: (8, np.float64),
    DataType.DT_BOOL: (1, np.bool_),
    DataType.DT_STRING: (16, np.bytes_),
    DataType.DT_BF16: (2, np.float16),
}


def test_every_data_type_has_its_size_and_numpy_type() -> None:
    for dtype in DataType:
        assert (dtype.itemsize, dtype_to_np_dtype[dtype]) == SIZES[dtype]
        assert CacheDesc(60, [3, 5, 7], dtype).size == 105 * SIZES[dtype][0], "bytes of one tensor"
    assert len(dtype_to_np_dtype) == 14


def test_numpy_types_and_dtype_objects_map_back_except_bfloat16() -> None:
    assert len(np_dtype_to_dtype) == len(valid_np_dtypes) == 13
    assert np_dtype_to_dtype[np.float16] is DataType.DT_FLOAT16
    assert DataType.DT_BF16 not in np_dtype_to_dtype.values()
    assert set(valid_np_dtypes) == set(np_dtype_to_dtype)
    assert np_dtype_to_dtype[np.zeros(1, np.uint16).dtype] is DataType.DT_UINT16
    assert np_dtype_to_dtype[np.array([b"abc"]).dtype] is DataType.DT_STRING
    for two_names in (np.longlong, np.int_):
        assert np_dtype_to_dtype[np.dtype(two_names)] is DataType.DT_INT64
    with pytest.raises(KeyError):
        np_dtype_to_dtype[np.dtype(np.complex64)]


# --- CacheDesc -----------------------------------------------------------------------------------------------------


def test_desc_gives_back_what_it_was_made_of_and_has_defaults() -> None:
    shape = [4, 8, 2]
    desc = CacheDesc(3, shape, HALF, Placement.HOST, 1, 2, "BSH")
    assert desc.shape is shape
    assert (desc.num_tensors, desc.data_type, desc.placement) == (3, HALF, Placement.HOST)
    assert (desc.batch_dim, desc.batch_size, desc.seq_len_dim_index, desc.kv_tensor_format) == (1, 8, 2, "BSH")
    desc = CacheDesc(0, (4, 8), DataType.DT_INT8)
    assert desc.placement is Placement.DEVICE
    assert (desc.batch_dim, desc.batch_size, desc.seq_len_dim_index, desc.kv_tensor_format) == (0, 4, -1, None)


def test_desc_accepts_numpy_integers_without_overflow() -> None:
    desc = CacheDesc(np.int32(2), [np.int32(2**20), np.int32(2**20)], HALF)  # type: ignore[arg-type, list-item]
    assert desc.size == 2**41
    assert type(desc.batch_size) is int


@pytest.mark.parametrize(
    ("kind", "field", "value", "parts"),
    [
        (TypeError, "num_tensors", "2", ["int", "'2'"]),
        (NoneArgument, "num_tensors", None, []),
        (ParamError, "num_tensors", -1, ["-1", "uint32"]),
        (ParamError, "num_tensors", 2**32, [str(2**32)]),
        (TypeError, "shape", "12", ["list, tuple", "'12'"]),
        (NoneArgument, "shape", None, []),
        (TypeError, "shape", [1, 2.0], ["shape[1]", "2.0"]),
        (ParamError, "shape", [1, 2**63], ["shape[1]", str(2**63), "int64"]),
        (NoneArgument, "shape", [None], ["shape[0]"]),
        (ParamError, "shape", [-(2**63) - 1], ["shape[0]", "int64"]),
        (TypeError, "data_type", 1, ["DataType", "1"]),
        (NoneArgument, "data_type", None, []),
        (TypeError, "placement", 1, ["Placement"]),
        (NoneArgument, "placement", None, []),
        (ParamError, "batch_dim_index", 2, ["2", "[0, 2)"]),
        (ParamError, "batch_dim_index", -1, ["-1"]),
        (TypeError, "batch_dim_index", 0.0, []),
        (NoneArgument, "batch_dim_index", None, []),
        (ParamError, "seq_len_dim_index", 2, ["2"]),
        (ParamError, "seq_len_dim_index", -2, ["-2"]),
        (ParamError, "seq_len_dim_index", 2**31, ["int32"]),
        (TypeError, "seq_len_dim_index", "0", []),
        (NoneArgument, "seq_len_dim_index", None, []),
        (TypeError, "kv_tensor_format", 1, ["str"]),
    ],
)
def test_r1_desc_refuses(
    refused: Callable[..., None], kind: type[Exception], field: str, value: object, parts: list[str]
) -> None:
    arguments: dict[str, Any] = {"num_tensors": 1, "shape": [1, 2], "data_type": HALF} | {field: value}
    refused(kind, partial(CacheDesc, **arguments), field, *parts)


def test_r1_desc_refuses_a_shape_without_its_batch_dimension(refused: Callable[..., None]) -> None:
    refused(ParamError, partial(CacheDesc, 1, [], HALF), "batch_dim_index", "0", "[0, 0)")


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ([4, 0], ("shape", "[4, 0]", "not positive")),
        ([4, -8], ("shape", "-8", "not positive")),
        ([1] * 32, ("shape", "32 dimensions", "31")),
        ([2**62, 2**62], ("shape", str(2**62), "beyond")),
        ([2**62], ("shape", "DT_FLOAT16", "beyond")),
    ],
)
def test_r29_size_of_an_impossible_shape_is_param_invalid(
    refused: Callable[..., None], shape: list[int], parts: tuple[str, ...]
) -> None:
    desc = CacheDesc(1, shape, HALF)
    refused(ParamError, lambda: desc.size, *parts)


def test_r29_size_of_31_dimensions_is_possible() -> None:
    assert CacheDesc(1, [1] * 30 + [5], HALF).size == 10


def test_update_dim_and_the_callers_own_list_change_shape_and_size_but_not_batch_size() -> None:
    shape = [4, 8]
    desc = CacheDesc(1, shape, HALF)
    assert desc.size == 64
    desc.update_dim(0, 6)
    assert (shape, desc.size, desc.batch_size) == ([6, 8], 96, 4)
    shape[1] = 1
    assert (desc.size, desc.batch_size) == (12, 4)


@pytest.mark.parametrize(
    ("kind", "shape", "arguments", "parts"),
    [
        (ParamError, [4, 8], (2, 1), ["dim_index", "2", "[0, 2)"]),
        (ParamError, [4, 8], (-1, 1), ["dim_index", "-1"]),
        (ParamError, [4, 8], (0, 2**63), ["dim_value", str(2**63)]),
        (TypeError, (4, 8), (0, 1), ["shape", "(4, 8)", "list"]),
        (TypeError, [4, 8], (0, "1"), ["dim_value"]),
        (NoneArgument, [4, 8], (None, 1), ["dim_index"]),
    ],
)
def test_r1_update_dim_refuses(
    refused: Callable[..., None], kind: type[Exception], shape: Any, arguments: tuple[Any, Any], parts: list[str]
) -> None:
    refused(kind, partial(CacheDesc(1, shape, HALF).update_dim, *arguments), *parts)


def test_desc_repr_shows_every_field_even_of_an_impossible_shape() -> None:
    assert repr(CacheDesc(2, [0, 3], HALF, Placement.HOST)) == (
        "CacheDesc(num_tensors=2, shape=[0, 3], data_type=DataType.DT_FLOAT16, placement=Placement.HOST, "
        "batch_dim_index=0, seq_len_dim_index=-1, kv_tensor_format=None)"
    )


# --- Cache ---------------------------------------------------------------------------------------------------------


def _host_desc(num_tensors: int = 2) -> CacheDesc:
    return CacheDesc(num_tensors, [4, 8], HALF, Placement.HOST)


def test_cpu_cache_is_an_unregistered_blocks_cache() -> None:
    desc, addresses = _host_desc(), [4096, 8192]
    cache = Cache.create_cpu_cache(desc, addresses)
    assert (cache.cache_id, cache.is_blocks_cache, cache.tensor_addrs) == (-1, True, addresses)
    assert cache.cache_desc is desc
    assert cache.tensor_addrs is not addresses


@pytest.mark.parametrize(
    ("kind", "cache_desc", "addrs", "parts"),
    [
        (NoneArgument, None, [1], ["cache_desc"]),
        (TypeError, "d", [1], ["cache_desc", "CacheDesc"]),
        (NoneArgument, _host_desc(), None, ["addrs"]),
        (TypeError, _host_desc(), (1, 2), ["addrs", "tuple"]),
        (TypeError, _host_desc(), [1, "2"], ["addrs[1]", "'2'"]),
        (ParamError, _host_desc(), [1, -2], ["addrs[1]", "-2"]),
        (ParamError, _host_desc(), [1], ["addrs", "1 addresses", "num_tensors=2"]),
        (ParamError, CacheDesc(1, [4, 8], HALF), [1], ["cache_desc", "Placement.DEVICE", "Placement.HOST"]),
    ],
)
def test_r16_r1_cpu_cache_refuses(
    refused: Callable[..., None], kind: type[Exception], cache_desc: Any, addrs: Any, parts: list[str]
) -> None:
    refused(kind, partial(Cache.create_cpu_cache, cache_desc, addrs), *parts)


class _Mapping:
    """Stands for the object that keeps a cache's memory mapped."""


def test_cache_keeps_its_memory_until_it_is_emptied() -> None:
    memory = _Mapping()
    alive = weakref.ref(memory)
    cache = Cache(3, _host_desc(), [1, 2], memory=memory)
    del memory
    gc.collect()
    assert alive() is not None
    addresses = cache.tensor_addrs
    cache._empty()
    gc.collect()
    assert alive() is None
    assert addresses == cache.tensor_addrs == []
    cache._empty()


def test_cache_repr_tells_kind_geometry_and_state_and_fields_cannot_be_replaced() -> None:
    cache = Cache(3, _host_desc(), [1, 2], is_blocks_cache=True)
    assert repr(cache) == "<Cache 3: blocks, 2 x [4, 8] DT_FLOAT16 on HOST>"
    cache._empty()
    assert repr(cache) == "<Cache 3: blocks, 2 x [4, 8] DT_FLOAT16 on HOST, deallocated>"
    with pytest.raises(AttributeError):
        cache.cache_id = 4  # type: ignore[misc]
