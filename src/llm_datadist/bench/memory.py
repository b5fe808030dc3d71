"""How much memory a comparison may take now."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from llm_datadist._memory.host import host_memory_limit

__all__ = ["available_memory"]

_USED_FILES: Final = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
_CGROUP: Final = "cgroup limit "
_PROC: Final = Path("/proc")


def available_memory(proc: Path = _PROC) -> tuple[int, str]:
    """Return the bytes that can still be had, and what bounds them.

    The smaller of MemAvailable and what the tightest cgroup has left. Pools are memfds, which the size of /dev/shm does
    not bound.

    Args:
        proc: Where procfs is; a test puts its own files there.
    """
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE)
    free, what = (int(match[1]) * 1024 if match else 0), "MemAvailable"
    limit, source = host_memory_limit(proc)
    if source.startswith(_CGROUP):
        left = limit - _used(Path(source.removeprefix(_CGROUP)))
        if left < free:
            return max(0, left), source
    return free, what


def _used(limit_file: Path) -> int:
    """Return what a cgroup uses; 0 where that cannot be read."""
    try:
        return int((limit_file.parent / _USED_FILES[limit_file.name]).read_text())
    except (OSError, ValueError):
        return 0
