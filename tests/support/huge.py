"""What tests of huge pages look at, and how they take them from a process."""

import ctypes
import re
from pathlib import Path
from typing import Final

HUGE: Final = 2 << 20
_PR_SET_THP_DISABLE: Final = 41  # linux/prctl.h


def mapped_huge(name: str) -> int:
    """Return how many bytes of the memfds of that name this process maps as huge pages."""
    return sum(
        int(kib) << 10
        for kib in re.findall(
            rf"/memfd:{name} [^/]*?^ShmemPmdMapped: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.MULTILINE
        )
    )


def without_huge_pages() -> None:
    """Let the kernel give this process no huge pages any more, as on a host that has none."""
    assert ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, *map(ctypes.c_ulong, (1, 0, 0, 0))) == 0


def given() -> bool:
    """Return True if this host gives huge pages to shared memory: Linux 6.1 or newer, not forbidden."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    release = re.match(r"(\d+)\.(\d+)", Path("/proc/sys/kernel/osrelease").read_text())
    assert release is not None
    return (
        setting.exists()
        and "[deny]" not in setting.read_text()
        and tuple(map(int, release.groups())) >= (6, 1)
        and (setting.parent / "hpage_pmd_size").read_text().strip() == str(HUGE)
    )
