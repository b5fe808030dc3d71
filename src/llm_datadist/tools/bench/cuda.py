"""NVIDIA's driver by ctypes, without this library's engine: as much as limits need, on device 0, in one thread."""

from __future__ import annotations

from ctypes import CDLL, byref, c_char_p, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_NAME: Final = "libcuda.so.1"


def why_not(*functions: str) -> str | None:
    """Return why there is no driver with these functions, or None. Starts nothing."""
    try:
        loaded = CDLL(_NAME)
    except OSError as error:
        return f"no NVIDIA driver: {error}"
    return next((f"the driver has no {each}" for each in functions if not hasattr(loaded, each)), None)


@cache
def _driver() -> CDLL:
    loaded, context = CDLL(_NAME), c_void_p()
    if (
        code := loaded.cuInit(0)
        or loaded.cuDevicePrimaryCtxRetain(byref(context), 0)
        or loaded.cuCtxPushCurrent_v2(context)
    ):
        raise RuntimeError(f"no GPU can be used: error {code} of the driver")
    return loaded


def call(function: str, *arguments: object) -> None:
    """Call the driver; an int is an int of C, other types are named. An error is a RuntimeError."""
    if code := getattr(_driver(), function)(*arguments):
        name = c_char_p()
        _driver().cuGetErrorName(code, byref(name))
        raise RuntimeError(f"{function}: {(name.value or b'%d' % code).decode()}")


def allocate(nbytes: int) -> int:
    """Return the address of new memory of the GPU, which stays until the process ends."""
    call("cuMemAlloc_v2", byref(at := c_uint64()), c_size_t(nbytes))
    return at.value


def free_bytes() -> int:
    """Return the free bytes of the GPU."""
    call("cuMemGetInfo_v2", byref(free := c_size_t()), byref(c_size_t()))
    return free.value


@cache
def stream() -> c_void_p:
    """Return the stream of all copies here."""
    call("cuStreamCreate", byref(made := c_void_p()), 1)  # non-blocking
    return made


def copy(pairs: Iterable[tuple[c_uint64, c_uint64]], nbytes: int) -> None:
    """Copy ``nbytes`` bytes for each destination and source, a cuMemcpyAsync each, and wait."""
    function, size, on = _driver().cuMemcpyAsync, c_size_t(nbytes), stream()
    if failed := next((code for dst, src in pairs if (code := function(dst, src, size, on))), 0):
        raise RuntimeError(f"cuMemcpyAsync: error {failed}")
    call("cuStreamSynchronize", on)
