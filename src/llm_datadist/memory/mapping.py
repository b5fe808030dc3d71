"""Ranges of addresses that NumPy arrays are laid over without a copy, and the kind of range that owns an mmap.

The stdlib's ``mmap`` keeps a duplicate of the descriptor for as long as the mapping lives, two descriptors a segment;
a process with hundreds of linked peers cannot afford them. Hence the two libc calls here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["AddressRange", "Mapping"]

# CDLL releases the GIL during the call: unmapping many gigabytes of touched pages takes a second.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.munmap.restype = ctypes.c_int
_MAP_FAILED = ctypes.c_void_p(-1).value


class AddressRange:
    """Bytes at an address of this process. Owns nothing; never changes, so any thread may use it.

    Attributes:
        address: Of the first byte.
        nbytes: How many bytes.
        writable: False makes every array over it read-only.
    """

    __slots__ = ("__weakref__", "address", "nbytes", "writable")

    def __init__(self, address: int, nbytes: int, *, writable: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.writable = writable

    @property
    def __array_interface__(self) -> dict[str, object]:
        """What NumPy needs to lay an array over the range; such an array keeps the range object alive."""
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, not self.writable)}

    def array(self) -> NDArray[np.uint8]:
        """Return the whole range as an array, shape (nbytes,), no copy; it keeps this object alive."""
        # NumPy's ArrayLike does not list __array_interface__.
        return np.asarray(cast(Any, self))


class Mapping(AddressRange):
    """A shared mapping of a descriptor, unmapped when the last reference to it dies: its segment's or an array's.

    It does not need the descriptor any more once it exists. Whichever thread drops the last reference unmaps.

    Raises:
        OSError: mmap refused; errno says why (EPERM: sealed against this kind of mapping).
    """

    __slots__ = ()

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        super().__init__(address, nbytes, writable=writable)
        # At exit the kernel unmaps; doing it earlier would pull memory from under other exit handlers.
        weakref.finalize(self, _libc.munmap, address, nbytes).atexit = False
