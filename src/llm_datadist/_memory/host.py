"""Host memory: the limit of this process, and the bytes it can still get. Any thread."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC: Final = Path("/proc")
_USED_FILES: Final = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
_LIMIT_FILES: Final = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}


def host_memory_limit(proc: Path = _PROC) -> tuple[int, str]:
    """Return the lowest of the host's memory and its mounted cgroup limits (v1, v2), in bytes, with the source.

    OSError if ``proc``, the mount point of procfs, does not tell the memory.
    """
    figures = _figures(proc)
    if "MemTotal" not in figures:
        raise OSError(f"{proc / 'meminfo'} has no MemTotal line")
    limits = [(figures["MemTotal"], "host memory")]
    limits += [(nbytes, f"cgroup limit {path}") for path, nbytes in cgroup_limits(proc)]
    return min(limits, key=lambda limit: limit[0])


def available_memory(proc: Path = _PROC) -> tuple[int, str]:
    """Return the bytes that this process can still get, with their bound.

    The bound is the lowest of MemAvailable plus free swap and each cgroup's rest with reclaimable cache. In overcommit
    mode 2 CommitLimit counts too. The size of /dev/shm does not bound memfds.
    """
    figures = _figures(proc)
    bounds = [(figures.get("MemAvailable", 0) + figures.get("SwapFree", 0), "MemAvailable")]
    if _read(proc / "sys/vm/overcommit_memory").strip() == "2":
        bounds.append((figures.get("CommitLimit", 0) - figures.get("Committed_AS", 0), "CommitLimit"))
    for path, limit in cgroup_limits(proc):
        used = _read(path.parent / _USED_FILES[path.name]).strip()
        cache = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(path.parent / "memory.stat"), re.MULTILINE)
        reclaimable = int(cache[1]) if cache else 0
        bounds.append((limit - (int(used) if used.isdecimal() else 0) + reclaimable, f"cgroup limit {path}"))
    free, source = min(bounds, key=lambda bound: bound[0])
    return max(0, free), source


def _figures(proc: Path) -> dict[str, int]:
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE)
    return {name: int(kilobytes) * 1024 for name, kilobytes in lines}


def cgroup_limits(proc: Path) -> Iterator[tuple[Path, int]]:
    """Yield limit files with their numbers."""
    groups = _own_groups(proc)
    for kind, root, mountpoint in _memory_mounts(proc):
        if kind not in groups:
            continue
        for folder in _folders(groups[kind], root, mountpoint):
            path = folder / _LIMIT_FILES[kind]
            text = _read(path).strip()
            if text.isdecimal():  # v2 has "max" for no limit
                yield path, int(text)


def _own_groups(proc: Path) -> dict[str, str]:
    """Return this process's group by file system."""
    groups = {}
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            groups["cgroup2"] = path
        elif "memory" in controllers.split(","):
            groups["cgroup"] = path
    return groups


def _memory_mounts(proc: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield (file system, root, mount point) of hierarchies that may limit memory."""
    for line in _read(proc / "self" / "mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            _, _, _, root, mountpoint, *_ = mount.split(" ")
            yield kind, _unescape(root), Path(_unescape(mountpoint))


def _folders(group: str, root: str, mountpoint: Path) -> Iterator[Path]:
    """Yield the folders of ``group`` and its ancestors, up to the mount point."""
    path = PurePosixPath(group)
    # Outside the mount's root, as in some containers: the top has the limit.
    inside = path.relative_to(root) if path.is_relative_to(root) and ".." not in path.parts else PurePosixPath()
    yield mountpoint / inside
    for ancestor in inside.parents:
        yield mountpoint / ancestor


def _unescape(text: str) -> str:
    """Undo mountinfo's octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _read(path: Path) -> str:
    try:
        # Mount points may have any bytes in their names.
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
