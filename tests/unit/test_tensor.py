"""Tensor and TensorDesc of v1 (interface §8)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_datadist import DataType, Tensor, TensorDesc
from llm_datadist.data_type import valid_np_dtypes
from llm_datadist.errors import ParamError
from tests.support.refusals import RULE, TYPE, Spec, raises, refuse_each

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


def test_bf16_comes_as_float32_by_value() -> None:
    patterns = np.array([0x0000, 0x8000, 0x3F80, 0xBF00, 0x4049, 0x7F80, 0x0001], np.uint16)
    expected = np.array([0.0, -0.0, 1.0, -0.5, 3.140625, np.inf, 2.0**-133], np.float32)
    for data in (patterns, patterns.view(np.float16)):
        tensor = Tensor(data, TensorDesc(DataType.DT_BF16, [7]))
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


def test_what_is_no_tensor_is_a_runtime_error_and_a_wrong_type_a_type_error() -> None:
    half = np.zeros((2, 3), np.float16)
    cases: list[tuple[Any, TensorDesc | None, str]] = [
        (half, TensorDesc(DataType.DT_FLOAT, [2, 3]), "DT_FLOAT"),
        (half, TensorDesc(DataType.DT_FLOAT16, [3, 2]), "[3, 2]"),
        (half, TensorDesc(DataType.DT_FLOAT16, [6]), "[6]"),
        (Tensor(half), TensorDesc(DataType.DT_INT16, [2, 3]), "DT_INT16"),
        (half.astype(np.int16), TensorDesc(DataType.DT_BF16, [2, 3]), "DT_BF16"),
        (half.T, None, "not contiguous"),
        (half.astype(np.complex64), None, "complex64"),
        (half.astype(object), None, "object"),
        (half.astype(">f4"), None, ">f4"),
        (np.zeros(2, "M8[s]"), None, "datetime64"),
        (4096, None, "tensor_desc"),
        *[(at, TensorDesc(DataType.DT_INT8, [4]), f"data={at}: 4 bytes") for at in (0, -1, 2**64 - 2)],
        (4096, TensorDesc(DataType.DT_INT8, [4, 0]), "[4, 0]"),
        (4096, TensorDesc(DataType.DT_STRING, [4]), "DT_STRING"),
    ]
    for data, desc, part in cases:
        with pytest.raises(RuntimeError) as caught:
            Tensor(data, desc)
        raises(caught.value, ParamError, (part,))
    refuse_each(
        Tensor, {"data": half}, {"data": Spec(([1], "a", 1.0, True)), "tensor_desc": Spec(([2, 3],), none_ok=True)}
    )
    refuse_each(Tensor(half).numpy, {}, {"copy": Spec((1,))})
    shapes = Spec((3,), (TYPE, "{}[1]", [1, "2"]), (RULE, "{}", [1, -1], [1, 2**63]))
    refuse_each(TensorDesc, {"dtype": DataType.DT_INT8, "shape": [1]}, {"dtype": Spec(("f",)), "shape": shapes})
