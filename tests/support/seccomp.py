"""Lets system calls of this process fail, by seccomp: as in a container that forbids them, and for good."""

import ctypes
import platform
import struct
from typing import Final

#: Of x86-64 and arm64.
_NUMBERS: Final = {
    "madvise": (28, 233),
    "memfd_create": (319, 279),
    "pidfd_open": (434, 434),
    "process_vm_readv": (310, 270),
}
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000
_THIRD_ARGUMENT: Final = 32  # struct seccomp_data: its lower half
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


def known() -> bool:
    """Return True if the numbers of this machine's system calls are known here."""
    return platform.machine() in ("x86_64", "aarch64")


def fail(call: str, code: int, third: int | None = None) -> None:
    """Let a system call fail with errno ``code``; with ``third``, only those whose third argument is that."""
    assert known()
    steps = [
        (_LOAD, 0, 0, 0),
        (_JUMP_EQUAL, 0, 1 if third is None else 3, _NUMBERS[call][platform.machine()[0] == "a"]),
    ]
    if third is not None:
        steps += [(_LOAD, 0, 0, _THIRD_ARGUMENT), (_JUMP_EQUAL, 0, 1, third)]
    steps += [(_RETURN, 0, 0, _ERRNO | code), (_RETURN, 0, 0, _ALLOW)]
    kept = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(kept)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    assert prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program), 0, 0) == 0
