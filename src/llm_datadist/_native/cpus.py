"""Number of processors that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from llm_datadist._native._native import for_main_thread

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """Return the lower of the CPU affinity and the cgroup's quota, rounded up, at least 1."""
    # An errand's thread has the affinity that the main thread had once.
    affinity = len(os.sched_getaffinity(os.getpid() if for_main_thread() else 0))
    quota = cpu_quota(_CGROUP_ROOT, _MEMBERSHIP)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def cpu_quota(root: Path, membership: Path) -> float | None:
    """Return the lowest quota of ``membership`` and its ancestors, in processors, or None."""
    quotas = [quota for folder in _folders(root, membership) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _folders(root: Path, membership: Path) -> list[Path]:
    """Return the folders of the cgroup and its parents, v2 (``0::/path``) and v1 (``n:cpu,cpuacct:/path``)."""
    folders: list[Path] = []
    for line in _text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" or "cpu" in controllers.split(","):
            mount = root / controllers
            own = mount / path.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent == mount or mount in parent.parents)]
    return folders


def _quota_of(folder: Path) -> float | None:
    v2 = _text(folder / "cpu.max").split()
    v1 = [_text(folder / f"cpu.cfs_{part}_us").strip() for part in ("quota", "period")]
    for fields in (v2, v1):
        try:
            quota, period = (int(field) for field in fields)
        except ValueError:  # "max", or no file
            continue
        if quota > 0 and period > 0:
            return quota / period
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
