"""Tensor and TensorDesc of v1 (interface §8)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_datadist import DataType, Tensor, TensorDesc
from llm_datadist.data_type import valid_np_dtypes
from llm_datadist.errors import NoneArgument, ParamError

pytestmark = pytest.mark.covers(
    "KvCacheManager", "Tensor", "TensorDesc", "valid_np_dtypes", "Tensor: numpy tensor_desc", "TensorDesc: dtype shape"
)


def test_a_tensor_over_an_array_is_the_array() -> None:
    for scalar in valid_np_dtypes:
        if scalar is np.bytes_:
            continue
        array = np.arange(6).astype(scalar).reshape(2, 3)
        tensor = Tensor(array)
        assert np.shares_memory(tensor.numpy(), array)
        assert (tensor.numpy().dtype, tensor.tensor_desc.shape) == (array.dtype, [2, 3])
        copy = tensor.numpy(copy=True)
        assert not np.shares_memory(copy, array)
        np.testing.assert_array_equal(copy, array)
        same = Tensor(tensor, TensorDesc(tensor.tensor_desc.dtype, (2, 3)))
        for again in (Tensor(tensor), same):
            assert np.shares_memory(again.numpy(), array)


def test_both_of_numpys_types_for_one_integer_are_that_integer() -> None:
    for name, dtype in (
        (np.longlong, DataType.DT_INT64),
        (np.ulonglong, DataType.DT_UINT64),
        (np.int_, DataType.DT_INT64),
    ):
        array = np.arange(3, dtype=name)
        assert Tensor(array).tensor_desc.dtype is dtype
        assert Tensor(array, TensorDesc(dtype, [3])).numpy() is array


@pytest.mark.parametrize("bits", [np.uint16, np.float16])
def test_bf16_comes_as_float32_by_value(bits: Any) -> None:
    patterns = np.array([0x0000, 0x8000, 0x3F80, 0xBF00, 0x4049, 0x7F80, 0x0001], np.uint16)
    tensor = Tensor(patterns.view(bits), TensorDesc(DataType.DT_BF16, [7]))
    expected = np.array([0.0, -0.0, 1.0, -0.5, 3.140625, np.inf, 2.0**-133], np.float32)
    np.testing.assert_array_equal(tensor.numpy(), expected)
    assert tensor.numpy().dtype == np.float32
    assert np.signbit(tensor.numpy()[1])
    assert repr(tensor) == "<Tensor DT_BF16 [7]>"


@pytest.mark.parametrize("text", [np.array(["a", "äb"]), np.array([b"a", b"bc"])])
def test_text_is_dt_string_and_only_copied(text: Any) -> None:
    tensor = Tensor(text)
    assert tensor.tensor_desc.dtype is DataType.DT_STRING
    with pytest.raises(RuntimeError, match="copy=True"):
        tensor.numpy()
    copy = tensor.numpy(copy=True)
    assert copy.tolist() == text.tolist()
    assert not np.shares_memory(copy, text)


def test_an_address_with_a_descriptor_of_its_own_shape_is_the_memory_there() -> None:
    array, shape = np.arange(6, dtype=np.int64), [3, 2]
    desc = TensorDesc(DataType.DT_INT64, shape)
    shape[0] = 9
    desc.shape[1] = 9
    assert (desc.dtype, desc.shape, TensorDesc(DataType.DT_INT8, ()).shape) == (DataType.DT_INT64, [3, 2], [])
    Tensor(array.ctypes.data, desc).numpy()[2, 1] = 50
    assert array[5] == 50


HALF = np.zeros((2, 3), np.float16)


@pytest.mark.parametrize(
    ("data", "desc", "part"),
    [
        (HALF, TensorDesc(DataType.DT_FLOAT, [2, 3]), "DT_FLOAT"),
        (HALF, TensorDesc(DataType.DT_FLOAT16, [3, 2]), "[3, 2]"),
        (HALF, TensorDesc(DataType.DT_FLOAT16, [6]), "[6]"),
        (Tensor(HALF), TensorDesc(DataType.DT_INT16, [2, 3]), "DT_INT16"),
        (HALF.astype(np.int16), TensorDesc(DataType.DT_BF16, [2, 3]), "DT_BF16"),
        (HALF.T, None, "not contiguous"),
        (HALF.astype(np.complex64), None, "complex64"),
        (HALF.astype(object), None, "object"),
        (HALF.astype(">f4"), None, ">f4"),
        (np.zeros(2, "M8[s]"), None, "datetime64"),
        (4096, None, "tensor_desc"),
        *[(at, TensorDesc(DataType.DT_INT8, [4]), f"data={at}: 4 bytes") for at in (0, -1, 2**64 - 2)],
        (4096, TensorDesc(DataType.DT_INT8, [4, 0]), "[4, 0]"),
        (4096, TensorDesc(DataType.DT_STRING, [4]), "DT_STRING"),
    ],
)
def test_what_is_no_tensor_is_a_runtime_error(data: Any, desc: TensorDesc | None, part: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        Tensor(data, desc)
    assert isinstance(caught.value, ParamError)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_types_are_type_errors() -> None:
    for data in ([1], "a", 1.0, True):
        with pytest.raises(TypeError, match="data"):
            Tensor(data)  # type: ignore[arg-type]
    with pytest.raises(NoneArgument, match="data"):
        Tensor(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tensor_desc"):
        Tensor(HALF, [2, 3])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="copy"):
        Tensor(HALF).numpy(1)  # type: ignore[arg-type]
    for dtype, shape, name in (
        ("f", [1], "dtype"),
        (None, [1], "dtype"),
        (DataType.DT_INT8, 3, "shape"),
        (DataType.DT_INT8, [1, "2"], r"shape\[1\]"),
    ):
        with pytest.raises(TypeError, match=name):
            TensorDesc(dtype, shape)  # type: ignore[arg-type]
    for dim in (-1, 2**63):
        with pytest.raises(ParamError, match="shape"):
            TensorDesc(DataType.DT_INT8, [1, dim])
