"""A trap that stops a thread inside a copy, at the first write to a chosen page.

Other threads run on; a SIGSTOP then surely stops the process in the middle of the copy.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import select
import struct
from contextlib import AbstractContextManager
from typing import Final

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_SYSCALL: Final = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY: Final = 1
# ioctls of linux/userfaultfd.h.
_API, _REGISTER, _UNREGISTER, _PROTECT = 0xC018AA3F, 0xC020AA00, 0x8010AA01, 0xC018AA06
_API_VERSION: Final = 0xAA
_WP_FLAG, _WP_SHARED, _WP_UNPOPULATED = 1 << 0, 1 << 12, 1 << 13
_MODE_WP: Final = 1 << 1
_PROTECTED: Final = 1 << 0


class PageTrap(AbstractContextManager["PageTrap"]):
    """Stops each thread of this process that writes to the page of ``address``, until :meth:`release`.

    A context manager. The memory must be mapped; its bytes do not change. If the kernel allows only user-mode
    ``userfaultfd``, copies by the kernel (cma, tcp) fail with EFAULT instead.

    Attributes:
        kernel_too: True if system calls that write there are stopped, too.

    Raises:
        OSError: The kernel denies ``userfaultfd`` to this process; :func:`trap_denied` returns the reason.
    """

    def __init__(self, address: int) -> None:
        self._page = address - address % _PAGE
        self._fd, self.kernel_too = _open()
        try:
            features = _WP_FLAG | _WP_SHARED | _WP_UNPOPULATED
            fcntl.ioctl(self._fd, _API, struct.pack("<QQQ", _API_VERSION, features, 0))
            fcntl.ioctl(self._fd, _REGISTER, struct.pack("<QQQQ", self._page, _PAGE, _MODE_WP, 0))
            self._protect(_PROTECTED)
        except BaseException:
            os.close(self._fd)
            raise
        self._armed = True

    def wait(self, seconds: float) -> bool:
        """Return True once a thread is stopped, False after ``seconds``."""
        return bool(select.select([self._fd], [], [], seconds)[0])

    def release(self) -> None:
        """Let stopped threads go on, and stop no more. Idempotent."""
        if self._armed:
            self._armed = False
            self._protect(0)
            fcntl.ioctl(self._fd, _UNREGISTER, struct.pack("<QQ", self._page, _PAGE))
            os.close(self._fd)

    def _protect(self, mode: int) -> None:
        fcntl.ioctl(self._fd, _PROTECT, struct.pack("<QQQ", self._page, _PAGE, mode))

    def __exit__(self, *exc_info: object) -> None:
        self.release()


def trap_denied() -> str | None:
    """Return the reason why this process cannot make a :class:`PageTrap`, or None."""
    memory = ctypes.create_string_buffer(2 * _PAGE)
    try:
        PageTrap(ctypes.addressof(memory) + _PAGE).release()
    except OSError as error:
        return f"userfaultfd: {error.strerror}"
    return None


def _open() -> tuple[int, bool]:
    """Return a userfaultfd descriptor, and True if it stops system calls, too."""
    if (number := _SYSCALL.get(platform.machine())) is None:
        raise OSError(0, f"no number of the system call is known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    for kernel_too in (True, False):
        fd = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | (0 if kernel_too else _USER_MODE_ONLY))
        if fd >= 0:
            return fd, kernel_too
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code))
