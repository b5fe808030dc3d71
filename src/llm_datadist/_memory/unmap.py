"""Unmapping without a control thread that waits for it: gigabytes of touched pages take the kernel seconds.

A thread that must not wait registers itself by :func:`never_wait_here`; what it would unmap is then unmapped by a
thread that exists only meanwhile. All others unmap by themselves, so that memory is free when ``finalize`` returns.
Threads: any; no lock is waited for, because the garbage collector may call. Without a thread left, the caller unmaps.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What takes the kernel less than a millisecond.
_SMALL_BYTES: Final = 16 << 20

# CDLL releases the interpreter lock during the call.
_libc = ctypes.CDLL(None)
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.munmap.restype = ctypes.c_int

_must_not_wait: Final[set[int]] = set()  # the threads that must not wait
_waiting: Final[deque[tuple[int, int]]] = deque()  # (address, bytes)
_state: Final = {"running": threading.Lock()}  # held by the thread that unmaps


def _forget() -> None:
    _must_not_wait.clear()
    _waiting.clear()
    _state["running"] = threading.Lock()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def never_wait_here() -> Iterator[None]:
    """Leave large unmappings of the calling thread to another one, during a ``with`` block."""
    _must_not_wait.add(threading.get_ident())
    try:
        yield
    finally:
        _must_not_wait.discard(threading.get_ident())


def unmap(address: int, nbytes: int) -> None:
    """Unmap memory, soon if the calling thread must not wait, else now."""
    if nbytes <= _SMALL_BYTES or threading.get_ident() not in _must_not_wait:
        _libc.munmap(address, nbytes)
        return
    _waiting.append((address, nbytes))
    if _state["running"].acquire(blocking=False):
        try:
            threading.Thread(target=_run, name="llm-datadist-unmap", daemon=True).start()
        except RuntimeError:  # no thread can be had
            _run()


def _run() -> None:
    """Unmap what waits; the caller has taken the lock for it."""
    while True:
        while _waiting:
            _libc.munmap(*_waiting.popleft())
        _state["running"].release()
        # What came between the last look and the release has found the lock taken.
        if not _waiting or not _state["running"].acquire(blocking=False):
            return
