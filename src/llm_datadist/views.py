"""NumPy and torch arrays over a cache's memory, without a copy. An extension.

Arrays of a pool cache keep the pool mapped, and after ``deallocate`` show its next content. Arrays over registered
memory are valid as long as that memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist._cache.local_caches import Storage
from llm_datadist._checks import check_type
from llm_datadist._memory.segment import Segment, view_of
from llm_datadist._native import NO_DEADLINE, Plan, Tensors, execute, plan_row
from llm_datadist.errors import LLMException, LLMStatusCode, ParamError
from llm_datadist.types import Cache, CacheDesc
from llm_datadist.types.data_type import numpy_type, torch_type

if TYPE_CHECKING:
    import torch

__all__ = ["numpy_type", "tensor_views", "torch_views"]


def tensor_views(cache: Cache) -> list[np.ndarray[Any, np.dtype[Any]]]:
    """Return one array per tensor of ``cache``, over its memory; ``DT_BF16`` as ``uint16`` bit patterns.

    Raises:
        TypeError: Not a Cache.
        ParamError: The cache was deallocated, its descriptor was enlarged, its elements are text (``DT_STRING``), or it
            lies in a GPU: use :func:`torch_views`.
    """
    storage, desc, dtype = _checked(cache)
    if storage is not None and storage.tensors.place.device >= 0:
        raise ParamError("cache: it lies in a GPU, where NumPy cannot look; torch_views has CUDA tensors over it")
    segments = () if storage is None else storage.segments
    views = [_bytes(address, desc.size, segments) for address in cache.tensor_addrs]
    return [view.view(dtype).reshape(tuple(desc.shape)) for view in views]


def host_tensors(cache: Cache) -> list[np.ndarray[Any, np.dtype[Any]]]:
    """Return :func:`tensor_views`; of a cache in a GPU, copies. Raises as that, and DeviceError."""
    storage, desc, dtype = _checked(cache)
    if storage is None or storage.tensors.place.device < 0:
        return tensor_views(cache)
    copies = [np.empty(desc.size, np.uint8) for _ in cache.tensor_addrs]
    target = Tensors(np.array([each.ctypes.data for each in copies], np.uint64), desc.size)
    plan = Plan(0, 0, len(copies), plan_row(0, 0, desc.size), ordered=False, nbytes=desc.size * len(copies))
    kept = [segment.keep() for segment in storage.segments]
    execute(plan, target.native, storage.tensors.native, None, NO_DEADLINE)
    del kept
    return [each.view(dtype).reshape(tuple(desc.shape)) for each in copies]


def _checked(cache: Cache) -> tuple[Storage | None, CacheDesc, type[np.generic]]:
    """Return storage, if the cache is one of an instance, descriptor and element type."""
    check_type("cache", cache, Cache)
    desc = cache.cache_desc
    if len(cache.tensor_addrs) != desc.num_tensors:
        raise ParamError("cache: it has no memory any more (deallocated)")
    dtype = numpy_type("cache_desc.data_type", desc.data_type)
    memory = cache._memory  # noqa: SLF001 (of a handle; no attribute for users)
    storage = memory if isinstance(memory, Storage) else None
    if storage is not None and desc.size > storage.tensors.extent:
        raise ParamError(
            f"cache_desc.shape={list(desc.shape)}: changed since the cache was made, whose tensors have "
            f"{storage.tensors.extent} bytes"
        )
    return storage, desc, dtype


def torch_views(cache: Cache) -> list[torch.Tensor]:
    """Return one torch tensor per tensor of ``cache``, over its memory; of a cache in a GPU, CUDA tensors.

    Raises:
        LLMException: torch is not installed (``LLM_FEATURE_NOT_ENABLED``).
        TypeError, ParamError: As :func:`tensor_views`; also for an unsigned type that torch lacks.
    """
    try:
        import torch
    except ImportError as error:
        text = "torch_views needs torch: install it, or use tensor_views"
        raise LLMException(text, status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED) from error
    storage, desc, _ = _checked(cache)
    kind = torch_type("cache_desc.data_type", desc.data_type)
    if storage is not None and (device := storage.tensors.place.device) >= 0:
        kept = [segment.keep() for segment in storage.segments]
        shown = [_CudaBytes(address, desc.size, kept) for address in cache.tensor_addrs]
        raw = [torch.as_tensor(each, device=f"cuda:{device}") for each in shown]
    else:
        raw = [torch.from_numpy(view.reshape(-1).view(np.uint8)) for view in tensor_views(cache)]
    return [each.view(kind).reshape(desc.shape) for each in raw]


class _CudaBytes:
    """Bytes of a GPU for torch, whose tensor keeps this object and so the memory."""

    def __init__(self, address: int, nbytes: int, kept: list[object]) -> None:
        self._kept = kept
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _bytes(address: int, nbytes: int, segments: tuple[Segment, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    for segment in segments:
        offset = address - segment.address
        if 0 <= offset <= segment.nbytes - nbytes:
            return segment.view(offset, nbytes)
    return view_of(address, nbytes)
