"""Permissions of this process; each check tries the operation itself."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from llm_datadist._memory.huge_pages import ALIGNMENT
from llm_datadist._memory.segment import SharedSegment, new_memfd
from llm_datadist._native import peek_process
from llm_datadist.errors import LLMException
from llm_datadist.tools.doctor.finding import Finding, Severity, judge

OLDEST: Final = (5, 3)
_WANTED: Final = (6, 5)
_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_UID_MAP: Final = Path("/proc/self/uid_map")
_ALL_USERS: Final = ["0", "0", "4294967295"]
_CHILD: Final = (
    "import ctypes; b = ctypes.create_string_buffer(b'llm-datadist'); print(ctypes.addressof(b), flush=True); input()"
)


def kernel() -> Finding:
    """Check the kernel's version."""
    release = os.uname().release
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    meaning = "Linux 5.3 has pidfd_open, 6.1 huge pages without an administrator, 6.5 the pidfd of a socket's peer"
    bad = Severity.WARNING if version >= OLDEST else Severity.PROBLEM
    return judge("kernel", version >= _WANTED, release, meaning, "boot Linux 6.5 or newer", bad)


def memfd() -> Finding:
    """Make and seal a memfd."""
    meaning = "pools are sealed memfds, which peers map: without them no instance with a pool starts"
    try:
        with open(new_memfd("doctor"), "wb") as file:
            file.truncate(4096)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        mend = "allow memfd_create in the container's seccomp profile: docker run --security-opt seccomp=PROFILE.json"
        return Finding("memfd", Severity.PROBLEM, f"refused: {error.strerror}", meaning, mend)
    return Finding("memfd", Severity.OK, "made and sealed", meaning)


def pidfd() -> Finding:
    """Open a pidfd of this process."""
    meaning = "the death of a peer on this host is seen by its pidfd; without it shm and cma cannot be used"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        mend = "allow pidfd_open in the container's seccomp profile: docker run --security-opt seccomp=PROFILE.json"
        return Finding("pidfd", Severity.PROBLEM, f"refused: {error.strerror}", meaning, mend)
    return Finding("pidfd", Severity.OK, "opened", meaning)


def process_vm_readv() -> Finding:
    """Read the memory of a child process."""
    meaning = "cma reads registered memory of peers with it; where it is refused, that memory goes over loopback tcp"
    with subprocess.Popen([sys.executable, "-P", "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            good = peek_process(child.pid, int(child.stdout.readline()), 12) == b"llm-datadist"
            value = "read a child's memory" if good else "wrong"
        except OSError as error:
            good, value = False, f"refused: {error.strerror}"
        finally:
            child.kill()
    mend = "docker run --cap-add SYS_PTRACE (or a seccomp profile that allows process_vm_readv)"
    return judge("process_vm_readv", good, value, meaning, mend)


def yama() -> Finding:
    """Check Yama's setting for processes that are not children."""
    meaning = "above 0, unrelated processes of one user do not reach each other by cma; registered memory goes over tcp"
    scope = _YAMA.read_text().strip() if _YAMA.exists() else "none"
    good = scope in ("none", "0") or (_has_ptrace_capability() and scope != "3")
    return judge("yama", good, f"ptrace_scope {scope}", meaning, "sysctl -w kernel.yama.ptrace_scope=0")


def _has_ptrace_capability() -> bool:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return bool(int(fields["CapEff"], 16) >> 19 & 1)


def user_namespace() -> Finding:
    """Check whether this process is in the first user namespace."""
    meaning = "cma does not reach into another user namespace: both sides must be in the same one"
    mend = "start both sides in one container or pod, or: docker run --userns=host"
    good = _UID_MAP.read_text().split() == _ALL_USERS
    return judge("user_namespace", good, "the host's" if good else "one of its own", meaning, mend)


def huge_pages() -> Finding:
    """Make a pool of one huge page."""
    meaning = "pools with huge_pages are faster for large transfers; where the host has none, they are refused"
    try:
        SharedSegment.create("doctor", ALIGNMENT, peers_may_write=False, huge_pages=True).close()
    except LLMException as error:
        mend = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled; or leave huge_pages out"
        return Finding("huge_pages", Severity.WARNING, str(error), meaning, mend)
    return Finding("huge_pages", Severity.OK, f"a pool of {ALIGNMENT} bytes was made", meaning)


CHECKS: Final = (kernel, memfd, pidfd, process_vm_readv, yama, user_namespace, huge_pages)
