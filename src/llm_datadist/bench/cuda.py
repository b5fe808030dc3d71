"""NVIDIA's driver by ctypes, as much of it as limits and the bytes of a GPU need; without this library's engine.

Everything uses device 0, in the one thread of a worker.
"""

from __future__ import annotations

from ctypes import CDLL, byref, c_char_p, c_size_t, c_ubyte, c_uint64, c_void_p
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from llm_datadist.bench.workload import Mirror

_NAME: Final = "libcuda.so.1"
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING


class CudaError(Exception):
    """A call of the driver returned an error."""


def why_not(*functions: str) -> str | None:
    """Return why there is no driver with these functions, or None. Starts nothing."""
    try:
        loaded = CDLL(_NAME)
    except OSError as error:
        return f"no NVIDIA driver: {error}"
    return next((f"the driver has no {each}" for each in functions if not hasattr(loaded, each)), None)


def _check(loaded: CDLL, function: str, *arguments: object) -> None:
    if code := getattr(loaded, function)(*arguments):
        name = c_char_p()
        loaded.cuGetErrorName(code, byref(name))
        raise CudaError(f"{function}: {(name.value or str(code).encode()).decode()}")


@cache
def _driver() -> CDLL:
    loaded, context = CDLL(_NAME), c_void_p()
    _check(loaded, "cuInit", 0)
    _check(loaded, "cuDevicePrimaryCtxRetain", byref(context), 0)
    _check(loaded, "cuCtxSetCurrent", context)
    return loaded


def call(function: str, *arguments: object) -> None:
    """Call the driver; an int is an int of C, other types are named. Raises CudaError."""
    _check(_driver(), function, *arguments)


def allocate(nbytes: int) -> int:
    """Return the address of new memory of the GPU, which stays until the process ends."""
    at = c_uint64()
    call("cuMemAlloc_v2", byref(at), c_size_t(nbytes))
    return at.value


def pinned(nbytes: int) -> NDArray[np.uint8]:
    """Return new memory of the host that the driver has pinned."""
    at = c_void_p()
    call("cuMemAllocHost_v2", byref(at), c_size_t(nbytes))
    return np.ctypeslib.as_array((c_ubyte * nbytes).from_address(at.value or 0))


class Stream:
    """A stream, whose copies have ended once :meth:`wait` returns."""

    def __init__(self) -> None:
        self.handle = c_void_p()
        call("cuStreamCreate", byref(self.handle), _NON_BLOCKING)

    def copy(self, pairs: Iterable[tuple[c_uint64, c_uint64]], nbytes: int) -> None:
        """Begin a copy of ``nbytes`` bytes for each destination and source."""
        copy, size, handle = _driver().cuMemcpyAsync, c_size_t(nbytes), self.handle
        for dst, src in pairs:
            if copy(dst, src, size, handle):
                raise CudaError("cuMemcpyAsync failed")

    def wait(self) -> None:
        """Wait for all copies begun before."""
        call("cuStreamSynchronize", self.handle)


def exchange(mirrors: Iterable[Mirror], *, send: bool) -> None:
    """Copy the bytes of mirrors to the GPU, or from it."""
    stream = Stream()
    for each in mirrors:
        here, there = c_uint64(each.ctypes.data), c_uint64(each.address)
        stream.copy([(there, here) if send else (here, there)], each.nbytes)
    stream.wait()
