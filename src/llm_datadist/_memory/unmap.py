"""Unmapping on a helper thread instead of the control thread: gigabytes take the kernel seconds.

Other threads unmap themselves, so memory is free when ``finalize`` returns. The garbage collector may call, so no lock
is taken. If no thread can be started, the caller unmaps.
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

#: Bytes unmapped in less than a millisecond: with every page touched, and (guard tables) with few.
_SMALL_BYTES: Final = 16 << 20
_SMALL_SPARSE_BYTES: Final = 64 << 20

# CDLL releases the interpreter lock during the call.
_libc = ctypes.CDLL(None)
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_must_not_wait: Final[set[int]] = set()  # thread idents

os.register_at_fork(after_in_child=_must_not_wait.clear)


@contextmanager
def never_wait_here() -> Iterator[None]:
    """Leave large unmappings of the calling thread to helper threads, during a ``with`` block."""
    _must_not_wait.add(threading.get_ident())
    try:
        yield
    finally:
        _must_not_wait.discard(threading.get_ident())


def must_not_wait() -> bool:
    """Return True inside :func:`never_wait_here`."""
    return threading.get_ident() in _must_not_wait


def unmap(address: int, nbytes: int, *, sparse: bool = False) -> None:
    """Unmap now, or soon if the calling thread must not wait. ``sparse``: few of the pages are touched."""
    small = nbytes <= (_SMALL_SPARSE_BYTES if sparse else _SMALL_BYTES)
    if small or not must_not_wait() or not unmap_elsewhere(address, nbytes, _SMALL_BYTES):
        _libc.munmap(address, nbytes)
