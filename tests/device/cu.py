"""The driver by ctypes: as much of libcuda.so.1 as tests of a driver need, be it the fake or a real one.

Programs of tests import all of it. It imports neither NumPy nor this library, so that they start quickly.
"""

from ctypes import (
    CDLL,
    Array,
    Structure,
    addressof,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
    memmove,
)
from functools import partial

U64 = c_uint64
SIZE = c_size_t
INT = c_int
MIB = 1 << 20
READ, WRITE = 1, 3
driver = CDLL("libcuda.so.1")


class Properties(Structure):
    """CUmemAllocationProp."""

    _fields_ = [("type", INT), ("types", INT), ("location", INT * 2), ("windows", c_void_p), ("flags", c_char * 8)]


class Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", INT * 2), ("flags", INT)]


class IpcHandle(Structure):
    """CUipcMemHandle."""

    _fields_ = [("bytes", c_char * 64)]


class CudaError(Exception):
    """A call returned an error: its code and name."""


def code(function: str, *arguments: object) -> int:
    """Call a function of the driver; return its result. An int is an int of C: other types are named."""
    result: int = getattr(driver, function)(*arguments)
    return result


def call(function: str, *arguments: object) -> None:
    """Call a function of the driver that must succeed."""
    if error := code(function, *arguments):
        name = c_char_p()
        driver.cuGetErrorName(error, byref(name))
        raise CudaError(error, (name.value or b"?").decode())


def start(device: int = 0) -> None:
    """Make a device's primary context current."""
    context = c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", byref(context), device)
    call("cuCtxPushCurrent_v2", context)


def mapped(size: int, *, fd: int | None = None, user: int = 0, access: int = WRITE) -> tuple[int, U64]:
    """Map exportable memory of device 0, new or that of a descriptor, for one device; return its address and handle."""
    handle, at = U64(), U64()
    if fd is None:
        call("cuMemCreate", byref(handle), SIZE(size), byref(Properties(1, 1, (1, 0))), U64(0))
    else:
        call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), 1)
    call("cuMemAddressReserve", byref(at), SIZE(size), SIZE(0), U64(0), U64(0))
    call("cuMemMap", at, SIZE(size), SIZE(0), handle, U64(0))
    call("cuMemSetAccess", at, SIZE(size), byref(Access((1, user), access)), SIZE(1))
    return at.value, handle


def unmap(at: int, handle: U64, size: int = 2 * MIB) -> None:
    call("cuMemUnmap", U64(at), SIZE(size))
    call("cuMemAddressFree", U64(at), SIZE(size))
    call("cuMemRelease", handle)


def export(handle: U64) -> int:
    fd = INT(-1)
    call("cuMemExportToShareableHandle", byref(fd), handle, 1, U64(0))
    return fd.value


def allocated(size: int) -> int:
    at = U64()
    call("cuMemAlloc_v2", byref(at), SIZE(size))
    return at.value


def pinned(size: int, content: bytes = b"") -> "Array[c_char]":
    """Return host memory that the driver allocated."""
    at = c_void_p()
    call("cuMemAllocHost_v2", byref(at), SIZE(size))
    memory = (c_char * size).from_address(at.value or 0)
    memmove(memory, content, len(content))
    return memory


def _made(function: str, flags: int) -> c_void_p:
    made = c_void_p()
    call(function, byref(made), flags)
    return made


stream, event = partial(_made, "cuStreamCreate", 1), partial(_made, "cuEventCreate", 2)


def _address(where: "int | Array[c_char]") -> U64:
    return U64(where if isinstance(where, int) else addressof(where))


def copy(to: "int | Array[c_char]", of: "int | Array[c_char]", size: int, on: c_void_p) -> None:
    call("cuMemcpyAsync", _address(to), _address(of), SIZE(size), on)


def wait(on: c_void_p) -> None:
    call("cuStreamSynchronize", on)


def kernel(text: bytes = b".version 6.0 .target sm_70 .address_size 64 .visible .entry datadist_copy(") -> c_void_p:
    module, function = c_void_p(), c_void_p()
    call("cuModuleLoadData", byref(module), text)
    call("cuModuleGetFunction", byref(function), module, b"datadist_copy")
    return function


def launch(function: c_void_p, to: list[int], of: list[int], runs: list[tuple[int, int, int]], on: c_void_p) -> None:
    """Launch datadist_copy with a plan in pinned memory, which stays."""
    words = [*to, *of, *(word for run in runs for word in run)]
    plan = _address(pinned(8 * len(words), bytes((c_uint64 * len(words))(*words)))).value
    values = U64(plan), U64(plan + 8 * len(to)), U64(plan + 16 * len(to)), c_uint32(len(to)), c_uint32(len(runs))
    pointers = (c_void_p * 5)(*(addressof(each) for each in values))
    call("cuLaunchKernel", function, 4, 1, 1, 256, 1, 1, 0, on, pointers, None)
