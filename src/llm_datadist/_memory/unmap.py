"""Unmapping without a control thread that waits for it: gigabytes of touched pages take the kernel seconds.

A thread that must not wait registers itself by :func:`never_wait_here`; what it would unmap is then unmapped by a
thread that exists only meanwhile. All others unmap by themselves, so that memory is free when ``finalize`` returns.
Threads: any; no lock is taken, because the garbage collector may call. Without a thread left, the caller unmaps.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from llm_datadist._native import unmap_elsewhere

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What takes the kernel less than a millisecond: of memory whose every page was touched, and of a guard table, in which
#: an end touches the pages of those guards that it compares.
_SMALL_BYTES: Final = 16 << 20
_SMALL_SPARSE_BYTES: Final = 64 << 20

# CDLL releases the interpreter lock during the call.
_libc = ctypes.CDLL(None)
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.munmap.restype = ctypes.c_int

_must_not_wait: Final[set[int]] = set()  # the threads that must not wait

os.register_at_fork(after_in_child=_must_not_wait.clear)


@contextmanager
def never_wait_here() -> Iterator[None]:
    """Leave large unmappings of the calling thread to another one, during a ``with`` block."""
    _must_not_wait.add(threading.get_ident())
    try:
        yield
    finally:
        _must_not_wait.discard(threading.get_ident())


def must_not_wait() -> bool:
    """Return True in a thread that has registered itself."""
    return threading.get_ident() in _must_not_wait


def unmap(address: int, nbytes: int, *, sparse: bool = False) -> None:
    """Unmap memory, soon if the calling thread must not wait, else now. ``sparse``: few of its pages are touched."""
    small = nbytes <= (_SMALL_SPARSE_BYTES if sparse else _SMALL_BYTES)
    if small or not must_not_wait() or not unmap_elsewhere(address, nbytes, _SMALL_BYTES):
        _libc.munmap(address, nbytes)
