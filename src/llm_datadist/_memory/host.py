"""The limit of host memory of this process: the host's memory, or less if a cgroup limits it. Any thread."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC: Final = Path("/proc")
_LIMIT_FILES: Final = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}


def host_memory_limit(proc: Path = _PROC) -> tuple[int, str]:
    """Return the smaller of the host's memory and every cgroup limit this process is under, with its source.

    Reads cgroup v2 (``memory.max``) and v1 (``memory.limit_in_bytes``) of our own group and of all its ancestors that
    are mounted here. ``proc`` is where procfs is mounted.
    """
    limits = [(_host_bytes(proc), "host memory")]
    limits += [(nbytes, f"cgroup limit {path}") for path, nbytes in _cgroup_limits(proc)]
    return min(limits, key=lambda limit: limit[0])


def _host_bytes(proc: Path) -> int:
    path = proc / "meminfo"
    match = re.search(r"^MemTotal:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"{path} has no MemTotal line")
    return int(match[1]) * 1024


def _cgroup_limits(proc: Path) -> Iterator[tuple[Path, int]]:
    """Yield every limit file of our groups that holds a number, with that number."""
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
    """Return the paths of our group in the v2 hierarchy and in v1's memory hierarchy."""
    groups = {}
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            groups["cgroup2"] = path
        elif "memory" in controllers.split(","):
            groups["cgroup"] = path
    return groups


def _memory_mounts(proc: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield (filesystem kind, root, mount point) of each hierarchy that may limit memory."""
    for line in _read(proc / "self" / "mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            _, _, _, root, mountpoint, *_ = mount.split(" ")
            yield kind, _unescape(root), Path(_unescape(mountpoint))


def _folders(group: str, root: str, mountpoint: Path) -> Iterator[Path]:
    """Yield the folder of ``group`` and of each ancestor, up to the mount point."""
    path = PurePosixPath(group)
    # A group outside the mount's root, as in some containers: use the limit at the top of the mount.
    inside = path.relative_to(root) if path.is_relative_to(root) and ".." not in path.parts else PurePosixPath()
    yield mountpoint / inside
    for ancestor in inside.parents:
        yield mountpoint / ancestor


def _unescape(text: str) -> str:
    """Undo the octal escapes of mountinfo: ``\\040`` is a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _read(path: Path) -> str:
    """Return a file's text, or "" if it is missing or may not be read."""
    try:
        # A mount point may have any bytes in its name.
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
