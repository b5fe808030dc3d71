"""Stopping inside a copy, after its first byte and before its last.

:class:`PageTrap` is exact: the thread that writes to one chosen page waits there until it is let go. The rest of its
process runs on; a SIGSTOP from outside then stops all of it, in the middle of the copy for certain. It needs
``userfaultfd``, which a kernel may deny to ordinary users: :func:`trap_denied` says so.

:func:`stop_inside_copy` needs nothing but luck: it looks at the destination until the first byte has changed, then
sends SIGSTOP. It says whether it was in time; whoever needs a number of trials repeats those that it missed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import select
import signal
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PageTrap", "frozen", "peek", "stop_inside_copy", "trap_denied"]

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_SYSCALL: Final = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY: Final = 1
# ioctls of linux/userfaultfd.h with their structs.
_API, _REGISTER, _UNREGISTER, _PROTECT = 0xC018AA3F, 0xC020AA00, 0x8010AA01, 0xC018AA06
_API_VERSION: Final = 0xAA
_WP_FLAG, _WP_SHARED, _WP_UNPOPULATED = 1 << 0, 1 << 12, 1 << 13
_MODE_WP: Final = 1 << 1
_PROTECTED: Final = 1 << 0


class PageTrap:
    """Stops whoever writes to the page of ``address`` in this process, until :meth:`release`.

    A context manager: leaving it releases. The memory must be mapped; nothing else of it changes. Where only the
    user-mode kind of ``userfaultfd`` is allowed, copies made by the kernel (cma, tcp) are not stopped but fail with
    EFAULT: :attr:`kernel_too` tells.

    Attributes:
        kernel_too: True when system calls that write there are stopped as well.

    Raises:
        OSError: This process may not.
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
        """Return True as soon as somebody stands there, False when nobody came in time."""
        return bool(select.select([self._fd], [], [], seconds)[0])

    def release(self) -> None:
        """Let it go on; nobody is stopped any more. Idempotent."""
        if self._armed:
            self._armed = False
            self._protect(0)
            fcntl.ioctl(self._fd, _UNREGISTER, struct.pack("<QQ", self._page, _PAGE))
            os.close(self._fd)

    def _protect(self, mode: int) -> None:
        fcntl.ioctl(self._fd, _PROTECT, struct.pack("<QQQ", self._page, _PAGE, mode))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


def trap_denied() -> str | None:
    """Return why this process can make no :class:`PageTrap`; None when it can."""
    memory = ctypes.create_string_buffer(2 * _PAGE)
    try:
        PageTrap(ctypes.addressof(memory) + _PAGE).release()
    except OSError as error:
        return f"userfaultfd: {error.strerror}"
    return None


def _open() -> tuple[int, bool]:
    """Return a descriptor, and whether it is of the kind that stops system calls too."""
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(0, f"no number of the system call is known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    for kernel_too in (True, False):
        fd = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | (0 if kernel_too else _USER_MODE_ONLY))
        if fd >= 0:
            return fd, kernel_too
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code))


def stop_inside_copy(pid: int, begun: Callable[[], bool], ended: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Stop a process as soon as a copy of it has begun; return True when that was before its end.

    Either way the process is stopped then: SIGCONT is the caller's.

    Args:
        pid: The process that copies.
        begun: True once the first byte has arrived, by a look at the destination; called again and again.
        ended: True once the last one has; called once the process does not run any more.
        seconds: For the copy to begin.

    Raises:
        TimeoutError: It did not, or the process does not stop.
    """
    limit = time.monotonic() + seconds
    while not begun():
        if time.monotonic() > limit:
            raise TimeoutError(f"no copy of process {pid} began within {seconds:g} s")
    os.kill(pid, signal.SIGSTOP)
    while not frozen(pid):
        if time.monotonic() > limit:
            raise TimeoutError(f"process {pid} is not stopped {seconds:g} s after it was watched first")
        time.sleep(0)
    return not ended()


def frozen(pid: int) -> bool:
    """Return True when no thread of a process runs, as after SIGSTOP; also when it has ended."""
    try:
        return all(_state(thread) in "TtZX" for thread in Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return not Path(f"/proc/{pid}").exists()


def _state(thread: Path) -> str:
    return (thread / "stat").read_text("ascii", "replace").rpartition(")")[2].split()[0]


def peek(pid: int, address: int, nbytes: int) -> bytes:
    """Return bytes of another process of our user, for ``begun`` and ``ended``.

    Raises:
        OSError: It may not be looked at, or nothing is mapped there.
    """
    fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, nbytes, address)
    finally:
        os.close(fd)
