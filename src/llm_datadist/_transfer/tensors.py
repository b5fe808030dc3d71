"""Memory of torch tensors and NumPy arrays that a caller registers. torch is not imported: a tensor's maker did so."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple, Protocol

import numpy as np

from llm_datadist._checks import check_rule
from llm_datadist.errors import NoneArgument, ParamError
from llm_datadist.types import CacheDesc, Placement
from llm_datadist.types.data_type import data_type_of


class TorchTensor(Protocol):
    """``torch.Tensor`` for type checkers, also where torch is not installed."""

    is_quantized: bool


GivenTensors = Sequence[TorchTensor] | Sequence[np.ndarray[Any, np.dtype[Any]]]  # at run time a list or a tuple


class Memory(NamedTuple):
    """Memory of one tensor, as long as ``kept`` lives."""

    kept: object
    address: int
    nbytes: int
    dtype: Any
    shape: tuple[int, ...]
    device: str
    contiguous: bool


def describe(tensors: object, placement: Placement | None, gpu: int) -> tuple[CacheDesc, list[Memory]]:
    """Return descriptor and memory of checked tensors, for an instance with that GPU (-1: none)."""
    if not isinstance(tensors, list | tuple):
        raise _wrong_type("tensors", tensors, "list, tuple")
    check_rule(tensors, "tensors is empty: one tensor for each K or V of a layer is needed")
    found = [_memory(f"tensors[{i}]", each) for i, each in enumerate(tensors)]
    first = found[0]
    for (i, each), what in product(enumerate(found), ("dtype", "shape", "device")):
        expected, own = getattr(first, what), getattr(each, what)
        check_rule(own == expected, f"tensors[{i}].{what}={own}: tensors[0] has {expected}; all have to be equal")
    for low, high in pairwise(sorted(range(len(found)), key=lambda i: found[i].address)):
        apart = found[low].address + found[low].nbytes <= found[high].address
        check_rule(apart, f"tensors[{high}]: it shares memory with tensors[{low}]")
    on_host = first.device == "cpu"
    check_rule(on_host or gpu >= 0, f"tensors[0].device={first.device}: no GPU here; set llm.DeviceMemory=cuda")
    lies = Placement.HOST if on_host and gpu >= 0 else Placement.DEVICE
    return CacheDesc(len(found), list(first.shape), first.dtype, lies if placement is None else placement), found


def _memory(name: str, value: object) -> Memory:
    torch: Any = sys.modules.get("torch")
    if isinstance(value, np.ndarray):
        check_rule(value.flags.writeable, f"{name}: read-only; a cache is memory that may be written")
        contiguous = value.flags.c_contiguous
        found = Memory(value, value.ctypes.data, value.nbytes, value.dtype, value.shape, "cpu", contiguous)
    elif isinstance(value, getattr(torch, "Tensor", ())):
        found = _of_torch(name, value, torch)
    else:
        raise _wrong_type(name, value, "torch.Tensor, numpy.ndarray")
    data_type_of(f"{name}.dtype", found.dtype)
    check_rule(found.shape and found.nbytes, f"{name}.shape={found.shape}: at least one dimension and one element")
    check_rule(found.contiguous, f"{name}: not contiguous; register contiguous parts, as kv[0] and kv[1], or a copy")
    check_rule(found.address, f"{name}: it has no memory")
    return found


def _of_torch(name: str, tensor: Any, torch: Any) -> Memory:  # noqa: ANN401 (torch may have no types here)
    kind, layout, device = type(tensor), tensor.layout, tensor.device
    check_rule(kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__, f"{name}: {kind.__name__} has no memory")
    check_rule(layout is torch.strided, f"{name}.layout={layout}: only torch.strided is one range of bytes")
    check_rule(device.type in ("cpu", "cuda"), f"{name}.device={device}: only memory of the host or of an NVIDIA GPU")
    check_rule(not tensor.is_neg(), f"{name}: its bytes are not its values, but the negatives; use resolve_neg()")
    try:
        storage, nbytes, shape = tensor.untyped_storage(), tensor.nbytes, tuple(tensor.shape)
        end = tensor.storage_offset() * tensor.element_size() + nbytes
        held, address, contiguous = storage.nbytes(), tensor.data_ptr(), tensor.is_contiguous()
    except RuntimeError as error:
        raise ParamError(f"{name}: torch does not tell its memory: {str(error).splitlines()[0]}") from error
    check_rule(held >= end or not contiguous, f"{name}: it ends at byte {end} of a storage of {held}")
    kept = tensor, storage  # both: the tensor may be given another storage
    return Memory(kept, address, nbytes, tensor.dtype, shape, str(device), contiguous)


def _wrong_type(name: str, value: object, allowed: str) -> TypeError:
    """Return the error, without the value: to show a tensor that has lost its memory ends the process."""
    kind = NoneArgument if value is None else TypeError
    return kind(f"{name} only support [{allowed}] but got {type(value).__name__}")
