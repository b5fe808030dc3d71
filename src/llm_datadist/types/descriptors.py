"""CacheDesc, the geometry of a cache, and Cache, its handle (interface §4, §5)."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, SupportsIndex, TypeVar

from llm_datadist._checks import (
    Attribute,
    check_int,
    check_int32,
    check_int64,
    check_rule,
    check_type,
    check_uint32,
    check_uint64_list,
)
from llm_datadist._native.public_call import OfProcess, public_call
from llm_datadist.errors import ParamError, StateError
from llm_datadist.types.data_type import DataType, data_type_of
from llm_datadist.types.enums import Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from llm_datadist.types.data_type import Dtype
    from llm_datadist.types.grant import Grant, Granter

    class _Tensor(Protocol):
        """A tensor of torch."""

        def numpy(self) -> np.ndarray[Any, Any]: ...
        def data_ptr(self) -> int: ...

    #: Block numbers: list, tuple or range; an extension: a 1-D array or CPU tensor, of integers.
    BlockNumbers = Sequence[SupportsIndex] | np.ndarray[Any, np.dtype[np.integer[Any]]] | _Tensor
    #: Of the dicts of ``copy_blocks`` and ``swap_blocks``: one source, one destination, several.
    Block = TypeVar("Block", bound=SupportsIndex)
    To = TypeVar("To", bound=SupportsIndex)
    Several = TypeVar("Several", bound=BlockNumbers)

_MAX_DIMS: Final = 31
_MAX_BYTES: Final = 2**63 - 1


class CacheDesc:
    """Geometry of a cache: ``num_tensors`` tensors of one shape and one element type.

    The arguments are the attributes (``batch_dim_index`` is ``batch_dim``).

    Raises:
        ParamError: An integer outside its width, a dimension index outside the shape, a dtype without DataType.
        TypeError: A wrong type (NoneArgument for None).

    Source: interface §4, §5.
    """

    num_tensors = Attribute[int]("Number of tensors, uint32.")
    shape: Attribute[Sequence[int]] = Attribute(
        "Shape of one tensor: the list or tuple of int64 given, for ``update_dim``. ``shape[0]`` counts rows or blocks."
    )
    data_type = Attribute[DataType]("Element type; may be given as a dtype of NumPy or torch (extension).")
    placement = Attribute[Placement]("Place of the memory.")
    batch_dim = Attribute[int]("Index of the dimension that counts batch rows, in [0, len(shape)).")
    batch_size = Attribute[int]("``shape[batch_dim]`` when the descriptor was made; ``update_dim`` does not change it.")
    seq_len_dim_index = Attribute[int]("Index of the sequence dimension, or -1.")
    kv_tensor_format = Attribute[str | None]("Free text for the caller, not interpreted, or None.")

    def __init__(
        self,
        num_tensors: int,
        shape: Sequence[int],
        data_type: Dtype,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        self._num_tensors = check_uint32("num_tensors", num_tensors)
        self._shape = check_type("shape", shape, (list, tuple))
        dims = [check_int64(f"shape[{i}]", dim) for i, dim in enumerate(self._shape)]
        check_rule(dims, f"shape is empty: 1 to {_MAX_DIMS} dimensions are possible")
        self._data_type = data_type_of("data_type", data_type)
        self._placement = check_type("placement", placement, Placement)
        self._batch_dim = batch = check_int("batch_dim_index", batch_dim_index)
        bounds = f"[0, {len(dims)}) ({dims})"
        check_rule(0 <= batch < len(dims), f"batch_dim_index: {batch} is outside {bounds}")
        self._seq_len_dim_index = seq = check_int32("seq_len_dim_index", seq_len_dim_index)
        check_rule(-1 <= seq < len(dims), f"seq_len_dim_index: {seq} is neither -1 nor in {bounds}")
        if kv_tensor_format is not None:
            check_type("kv_tensor_format", kv_tensor_format, str)
        self._kv_tensor_format = kv_tensor_format
        self._batch_size = dims[self._batch_dim]

    @property
    def size(self) -> int:
        """Bytes of one tensor.

        Raises:
            ParamError: More than 31 dimensions or none, one that is not positive, or a total beyond int64.
        """
        # Not cached: the shape is the caller's list, which may change.
        shape = self._shape
        if not 1 <= len(shape) <= _MAX_DIMS:
            raise ParamError(f"shape: {len(shape)} dimensions, 1 to {_MAX_DIMS} are possible")
        dims = [check_int64("shape", dim) for dim in shape]
        if min(dims) <= 0:
            raise ParamError(f"shape: {dims} has a dimension that is not positive")
        size = math.prod(dims) * self._data_type.itemsize
        if size > _MAX_BYTES:
            raise ParamError(f"shape: {dims} of {self._data_type.name} is {size} bytes, beyond {_MAX_BYTES}")
        return size

    def update_dim(self, dim_index: int, dim_value: int) -> None:
        """Set ``shape[dim_index]``, in the caller's list too; ``batch_size`` does not follow.

        Raises:
            TypeError: The shape is a tuple, or an argument is not an int.
            ParamError: ``dim_index`` outside the shape, ``dim_value`` outside int64.

        Source: interface §4.
        """
        index = check_int("dim_index", dim_index)
        value = check_int64("dim_value", dim_value)
        if not isinstance(self._shape, list):
            raise TypeError(f"shape: {self._shape!r} is a tuple; update_dim needs a descriptor made with a list")
        check_rule(
            0 <= index < len(self._shape), f"dim_index: {index} is outside [0, {len(self._shape)}) ({self._shape})"
        )
        self._shape[index] = value

    def __repr__(self) -> str:
        return (
            f"CacheDesc(num_tensors={self._num_tensors}, shape={self._shape!r}, data_type={self._data_type}, "
            f"placement={self._placement}, batch_dim_index={self._batch_dim}, "
            f"seq_len_dim_index={self._seq_len_dim_index}, kv_tensor_format={self._kv_tensor_format!r})"
        )


class Cache(OfProcess):
    """Handle of a manager's cache, or of user memory (``create_cpu_cache``).

    Not made by users. The addresses are valid until ``deallocate`` or ``finalize``. Calls of another LLMDataDist or
    ``init`` refuse it with CacheError.

    Source: interface §4.
    """

    __slots__ = ("__weakref__", "_cache_desc", "_cache_id", "_granter", "_is_blocks_cache", "_memory", "_tensor_addrs")

    cache_id = Attribute[int]("Id at the owner, >= 1; -1 for a CPU cache.")
    cache_desc = Attribute[CacheDesc]("Geometry.")
    tensor_addrs = Attribute[list[int]]("Address of each tensor; empty after ``deallocate``.")
    is_blocks_cache = Attribute[bool]("True for a blocks cache.")

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        tensor_addrs: list[int],
        is_blocks_cache: bool = False,
        *,
        memory: object = None,
        granter: Granter | None = None,
    ) -> None:
        self._cache_id = check_int64("cache_id", cache_id)
        self._cache_desc = check_type("cache_desc", cache_desc, CacheDesc)
        self._tensor_addrs = check_uint64_list("tensor_addrs", tensor_addrs, tuple_ok=False)
        self._is_blocks_cache = check_type("is_blocks_cache", is_blocks_cache, bool)
        # This library's modules read both, and no user: the first keeps the addresses mapped, the second is the maker,
        # of one init, by which calls refuse foreign handles (None after create_cpu_cache).
        self._memory = memory
        self._granter = granter

    @staticmethod
    def create_cpu_cache(cache_desc: CacheDesc, addrs: list[int]) -> Cache:
        """Return a blocks cache (id -1, not registered) over the caller's host memory, for ``swap_blocks``.

        Raises:
            ParamError: Placement not HOST, or another number of addresses than ``num_tensors``.
            TypeError: A wrong type; ``addrs`` must be a list (NoneArgument for None).

        Source: interface §4.
        """
        check_type("cache_desc", cache_desc, CacheDesc)
        addresses = check_uint64_list("addrs", addrs, tuple_ok=False)
        check_rule(
            cache_desc.placement is Placement.HOST,
            f"cache_desc: placement is {cache_desc.placement}, a CPU cache needs Placement.HOST",
        )
        found, needed = len(addresses), cache_desc.num_tensors
        check_rule(found == needed, f"addrs: {found} addresses for num_tensors={needed}, one each is needed")
        return Cache(-1, cache_desc, addresses, is_blocks_cache=True)

    @partial(public_call, owned=True)
    def grant(
        self,
        blocks: BlockNumbers,
        ttl: float | None,
        *,
        token: bytes | None = None,
        peer: int | None = None,
        on_end: Callable[[Grant], None] | None = None,
    ) -> Grant:
        """Let peers pull these blocks for ``ttl`` seconds, or while ``peer`` is linked. An extension.

        For blocks that serve one request after the other: end the grant before their next use, so that a late pull
        fails. Contents are not compared.

        Args:
            blocks: Block numbers; list, tuple, range, or a 1-D integer array or CPU tensor.
            ttl: Lifetime in seconds, above 0; :meth:`Grant.renew` changes it. None, only with ``peer``: no limit.
            token: 16 random bytes that name the grant. Default: None, the library draws them. With a token of its own,
                a scheduler names the grant to a reader before the owner makes it; the reader's claim waits.
            peer: Cluster id of a linked peer that is the grant's one reader from now on. The grant ends with that link,
                or by the peer's ``CacheManager.release_grant``. Default: None, readers claim the grant.
            on_end: Called once with the grant after it has ended, in any thread; it must not wait. The call may come
                before this one returns. Default: None.

        Raises:
            TypeError: Wrong types.
            ParamError: Not a blocks cache, a block outside it, no block, a bad ``ttl``, a token of another length or
                used before.
            CacheNotFound: The cache was freed.
            NotLinked: ``peer`` is not linked.
            StateError: A handle of ``create_cpu_cache``, a finalized manager (``LLM_ENGINE_FINALIZED``), or a forked
                child.
        """
        if self._granter is None:
            raise StateError(f"grant: {self!r} is the handle of no manager, so peers cannot reach it")
        return self._granter.grant(self._cache_id, blocks, ttl, token, peer, on_end)

    @staticmethod
    def _cut_off(grant: Grant) -> None:
        """End a grant whose caller does not get it."""
        grant.revoke()

    def _empty(self) -> None:
        """Drop addresses and memory, for deallocation."""
        self._tensor_addrs.clear()
        self._memory = None

    def __repr__(self) -> str:
        kind = "blocks" if self._is_blocks_cache else "continuous"
        state = "" if self._tensor_addrs or not self._cache_desc.num_tensors else ", deallocated"
        desc = self._cache_desc
        return (
            f"<Cache {self._cache_id}: {kind}, {desc.num_tensors} x {list(desc.shape)} {desc.data_type.name} "
            f"on {desc.placement.name}{state}>"
        )
