"""Huge pages: memfds that the kernel maps in pieces of 2 MiB, here and at peers.

They are transparent huge pages by MADV_COLLAPSE (Linux 6.1), without a reservation. Stateless; any thread.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Final

from llm_datadist.errors import LLMException, LLMStatusCode, OutOfMemory, ParamError

#: Size on x86-64, and on arm64 with 4 KiB pages. The kernel maps a huge page as one only at a multiple of it.
ALIGNMENT: Final = 2 << 20
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage")
_MADV_COLLAPSE: Final = 25  # linux/mman.h
_AT_ONCE: Final = 32  # per system call, which signals cannot interrupt
_TRIES: Final = 16
_SHORT: Final = frozenset({errno.ENOMEM, errno.EBUSY, errno.EAGAIN, errno.ENOSPC})
#: Refusals by a setting, an old kernel or seccomp.
_NOT_GIVEN: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES})

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def check_size(name: str, nbytes: int) -> None:
    """Raise ParamError unless ``nbytes`` is whole huge pages, of at most 2 MiB."""
    page = _page_bytes()
    if page > ALIGNMENT or not page:
        raise _refusal(name, f"its huge pages have {page} bytes" if page else "it has none")
    if nbytes % page:
        raise ParamError(f"pool {name!r}: huge_pages needs a multiple of {page} bytes, memory_size is {nbytes}")


def populate(name: str, fd: int, address: int, nbytes: int) -> None:
    """Fill the empty memfd ``fd``, mapped at ``address``, with huge pages of zeros.

    OutOfMemory: too little memory is free in pieces of that size. ParamError: this host gives no huge pages to shared
    memory. LLMException: the kernel failed otherwise.
    """
    page = _page_bytes()
    for start in range(0, nbytes, _AT_ONCE * page):
        end = min(nbytes, start + _AT_ONCE * page)
        try:
            for offset in range(start, end, page):
                # MADV_COLLAPSE needs one small page in each; a lack of memory is an error here.
                os.posix_fallocate(fd, offset, mmap.PAGESIZE)
            _collapse(address + start, end - start)
        except OSError as error:
            if error.errno in _NOT_GIVEN:
                raise _refusal(name, str(error)) from error
            if error.errno not in _SHORT:
                text = f"pool {name!r}: huge pages failed after {start} of {nbytes} bytes: {error}"
                raise LLMException(text, status_code=LLMStatusCode.LLM_FAILED) from error
            text = (
                f"pool {name!r}: no more huge pages after {start} of {nbytes} bytes ({error}); free memory is in "
                "smaller pieces, or a limit of the cgroup is reached: free some, or leave huge_pages out"
            )
            raise OutOfMemory(text, pool=name, requested=nbytes, free=start, largest_hole=start) from error


def _collapse(address: int, nbytes: int) -> None:
    for left in reversed(range(_TRIES)):
        if _libc.madvise(address, nbytes, _MADV_COLLAPSE) == 0:
            return
        code = ctypes.get_errno()
        if code != errno.EAGAIN or not left:  # EAGAIN: the kernel was using one of the pages
            raise OSError(code, os.strerror(code))


def _page_bytes() -> int:
    """Return the size of a huge page, 0 if the kernel has none."""
    try:
        return int((_THP / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def _refusal(name: str, why: str) -> ParamError:
    try:
        setting = (_THP / "shmem_enabled").read_text().strip()
    except OSError:
        setting = "missing"
    return ParamError(
        f"pool {name!r}: huge_pages is true, but this host gives no huge pages of {ALIGNMENT} bytes to shared memory: "
        f"{why} (Linux {os.uname().release}, 6.1 is needed; {_THP}/shmem_enabled: {setting}, which must not be deny; "
        "prctl PR_SET_THP_DISABLE must not be set); leave huge_pages out"
    )
