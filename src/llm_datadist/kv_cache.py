"""KvCache, the handle of a cache in v1 mode (interface §4)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from llm_datadist._checks import Attribute, check_int, check_int64, check_rule, check_type, type_error
from llm_datadist._memory.segment import view_of
from llm_datadist.errors import ParamError
from llm_datadist.types.data_type import DataType, canonical_type, np_dtype_to_dtype
from llm_datadist.types.descriptors import Cache, CacheDesc
from llm_datadist.views import numpy_type

if TYPE_CHECKING:
    from collections import deque

    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["KvCache", "Tensor", "TensorDesc"]


class KvCache:
    """Handle of a KvCacheManager's cache, or of host memory for ``swap_blocks``. Not made by users.

    Keep it while its addresses are in use: the manager's next call deallocates the cache of a dropped handle. ``copy``
    returns the handle itself; pickling it is a TypeError.

    Source: interface §4.
    """

    __slots__ = ("__weakref__", "_cache", "_forgotten")

    def __init__(self, cache: Cache, forgotten: deque[int] | None = None) -> None:
        self._forgotten = forgotten
        self._cache = cache

    @staticmethod
    def create_cpu_cache(cache_desc: CacheDesc, addrs: list[int] | list[list[int]]) -> KvCache:
        """Return a blocks cache (id -1, not registered) over the caller's host memory, for ``swap_blocks``.

        Args:
            addrs: One address per tensor, or a list with one such list.

        Raises:
            TypeError: Wrong types; ``addrs`` must be a list (``NoneArgument`` for None).
            ParamError: Placement not HOST, mixed elements, another number of addresses than ``num_tensors``, of lists
                than 1.
        """
        check_type("cache_desc", cache_desc, CacheDesc)
        given = check_type("addrs", addrs, list)
        check_rule(given, "addrs is empty: one address per tensor is needed")
        nested = [isinstance(each, list) for each in given]
        check_rule(
            all(nested) or not any(nested), "addrs: element types should be consistent, all addresses or all lists"
        )
        if nested[0]:
            check_rule(len(given) == 1, f"addrs has {len(given)} lists: one per device is needed, and there is one")
        return KvCache(Cache.create_cpu_cache(cache_desc, given[0] if nested[0] else given))

    @property
    def cache_id(self) -> int:
        """Id at the owner, >= 1; -1 for a CPU cache."""
        return self._cache.cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """Geometry."""
        return self._cache.cache_desc

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """One list with the address of each tensor; empty after deallocation."""
        addresses = self._cache.tensor_addrs
        return [addresses] if addresses else []

    # A second handle would deallocate the cache while the first is in use.
    def __deepcopy__(self, memo: object = None) -> KvCache:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r}: it is of this process and cannot be pickled; others name a cache by its key")

    def __del__(self) -> None:
        # The garbage collector calls this in any thread, under any lock, so it takes none.
        if self._forgotten is not None and self._cache.tensor_addrs:
            self._forgotten.append(self._cache.cache_id)

    def __repr__(self) -> str:
        return f"<Kv{repr(self._cache)[1:]}"


def cache_of(kv_cache: KvCache) -> Cache:
    """Return the v2 handle behind a v1 handle, for KvCacheManager."""
    return kv_cache._cache  # noqa: SLF001 (of this module; no attribute for users)


class TensorDesc:
    """Element type and shape of a tensor.

    Raises:
        TypeError: Wrong types (``NoneArgument`` for None).
        ParamError: A negative dimension, or one outside int64.

    Source: interface §8.
    """

    __slots__ = ("_dtype", "_shape")

    dtype = Attribute[DataType]("Element type.")

    def __init__(self, dtype: DataType, shape: list[int] | tuple[int, ...]) -> None:
        self._dtype = check_type("dtype", dtype, DataType)
        self._shape = [
            check_int64(f"shape[{i}]", dim) for i, dim in enumerate(check_type("shape", shape, (list, tuple)))
        ]
        check_rule(min(self._shape, default=0) >= 0, f"shape: {self._shape} has a negative dimension")

    @property
    def shape(self) -> list[int]:
        """Shape, as a new list."""
        return list(self._shape)

    def __repr__(self) -> str:
        return f"TensorDesc({self._dtype}, {self._shape})"


class Tensor:
    """Tensor over memory that it neither owns nor copies.

    Args:
        data: C-contiguous array of native byte order, text included; another Tensor; or an address of host memory,
            which must outlive the tensor.
        tensor_desc: Required for an address. Default: None, the array's. With ``DT_BF16`` the array has the bit
            patterns as ``uint16`` or ``float16``.

    Raises:
        TypeError: Wrong types (``NoneArgument`` for None).
        ParamError: An unsupported element type, an array that is not contiguous, another shape or type than
            ``tensor_desc``, an address without it.

    Source: interface §8.
    """

    __slots__ = ("_array", "_tensor_desc")

    tensor_desc = Attribute[TensorDesc]("Element type and shape.")

    def __init__(self, data: Array | Tensor | int, tensor_desc: TensorDesc | None = None) -> None:
        if tensor_desc is not None:
            check_type("tensor_desc", tensor_desc, TensorDesc)
        self._array, found = Tensor._content(data, tensor_desc)
        self._tensor_desc = wanted = tensor_desc or found
        bits = wanted.dtype is DataType.DT_BF16 and self._array.dtype in (np.uint16, np.float16)
        check_rule(
            found.dtype is wanted.dtype or bits,
            f"tensor_desc.dtype={wanted.dtype.name}: data has {found.dtype.name}",
        )
        check_rule(found.shape == wanted.shape, f"tensor_desc.shape={wanted.shape}: data has {found.shape}")

    @staticmethod
    def _content(data: Array | Tensor | int, tensor_desc: TensorDesc | None) -> tuple[Array, TensorDesc]:
        if isinstance(data, Tensor):
            other: Tensor = data
            return other._array, other._tensor_desc
        if isinstance(data, np.ndarray):
            return data, _described(data)
        if hasattr(data, "__index__") and not isinstance(data, bool):
            return _at(check_int("data", data), tensor_desc)
        raise type_error("data", data, (np.ndarray, Tensor) if isinstance(data, bool) else (np.ndarray, Tensor, int))

    def numpy(self, copy: bool = False) -> Array:
        """Return the tensor's own array, or a copy if ``copy`` is True.

        ``DT_BF16`` is always copied, to float32.

        Raises:
            ParamError: Text (``DT_STRING``) without ``copy``.
        """
        check_type("copy", copy, bool)
        if self._tensor_desc.dtype is DataType.DT_BF16:
            # The upper half of a float32, bit by bit.
            return (self._array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if self._tensor_desc.dtype is DataType.DT_STRING:
            check_rule(copy, "copy=False: text has no memory that could be shared; use numpy(copy=True)")
        return self._array.copy() if copy else self._array

    def __repr__(self) -> str:
        return f"<Tensor {self._tensor_desc.dtype.name} {self._tensor_desc.shape}>"


def _described(array: Array) -> TensorDesc:
    """Return an array's descriptor; ParamError if the interface has none."""
    dtype = DataType.DT_STRING if array.dtype.kind in "US" else np_dtype_to_dtype.get(canonical_type(array.dtype))
    check_rule(dtype is not None and array.dtype.isnative, f"data: element type {array.dtype} is not supported")
    check_rule(
        array.flags.c_contiguous,
        f"data: an array of shape {array.shape} and strides {array.strides} is not contiguous; "
        "numpy.ascontiguousarray makes one that is",
    )
    assert dtype is not None
    return TensorDesc(dtype, array.shape)


def _at(address: int, desc: TensorDesc | None) -> tuple[Array, TensorDesc]:
    """Return an array over host memory at ``address``."""
    if desc is None:
        raise ParamError(f"data={address}: an address needs tensor_desc, which says what is there")
    dtype = numpy_type("tensor_desc.dtype", desc.dtype)
    nbytes = math.prod(desc.shape) * desc.dtype.itemsize
    check_rule(nbytes > 0, f"tensor_desc.shape={desc.shape}: an address needs at least one element")
    check_rule(0 < address <= 2**64 - nbytes, f"data={address}: {nbytes} bytes there are outside [1, 2**64)")
    return view_of(address, nbytes).view(dtype).reshape(desc.shape), desc
