"""How much memory this process can still have, from a procfs and cgroups of our own; memfds that are not executable."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING

import pytest

from llm_datadist._memory import segment
from llm_datadist._memory.device import HostDevice
from llm_datadist._memory.host import available_memory
from llm_datadist._memory.pool import create_pool
from llm_datadist.errors import OutOfMemory

if TYPE_CHECKING:
    from pathlib import Path

MEMINFO = """MemTotal:       1000 kB
MemAvailable:    600 kB
SwapFree:        100 kB
CommitLimit:     800 kB
Committed_AS:    300 kB
"""


def _proc(tmp_path: Path, *, overcommit: str = "0", cgroup: dict[str, str] | None = None) -> Path:
    (tmp_path / "sys/vm").mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "sys/vm/overcommit_memory").write_text(f"{overcommit}\n")
    (tmp_path / "self/cgroup").write_text("0::/job\n")
    (tmp_path / "self/mountinfo").write_text(f"30 20 0:26 / {tmp_path}/cg rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "cg/job").mkdir(parents=True)
    for name, text in (cgroup or {}).items():
        (tmp_path / "cg/job" / name).write_text(f"{text}\n")
    return tmp_path


LIMITED = {"memory.max": "500000", "memory.current": "400000", "memory.stat": "anon 1\ninactive_file 50000"}


@pytest.mark.parametrize(
    ("overcommit", "cgroup", "free", "source"),
    [
        ("0", {}, 700 * 1024, "MemAvailable"),
        ("2", {}, 500 * 1024, "CommitLimit"),
        ("0", LIMITED, 150_000, "cgroup limit"),
        ("0", LIMITED | {"memory.stat": ""}, 100_000, "cgroup limit"),
        ("0", LIMITED | {"memory.current": "700000"}, 0, "cgroup limit"),
        ("0", {"memory.max": "max"}, 700 * 1024, "MemAvailable"),
    ],
)
def test_the_tightest_bound_is_what_can_still_be_had(
    tmp_path: Path, overcommit: str, cgroup: dict[str, str], free: int, source: str
) -> None:
    found, bound = available_memory(_proc(tmp_path, overcommit=overcommit, cgroup=cgroup))
    assert (found, bound.startswith(source)) == (free, True)


def test_a_pool_that_cannot_be_backed_is_out_of_memory_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_datadist._memory.pool.available_memory", lambda: (65536, "MemAvailable"))
    create_pool("device", HostDevice(), 65536, 12, peers_may_write=False, prefault=False).close()
    with pytest.raises(OutOfMemory, match=r"131072 bytes, of which 65536 can be had now \(MemAvailable\)") as caught:
        create_pool("device", HostDevice(), 131072, 12, peers_may_write=False, prefault=False)
    assert (caught.value.requested, caught.value.free) == (131072, 65536)


@pytest.mark.parametrize("old_kernel", [False, True])
def test_memory_that_is_shared_is_not_executable(monkeypatch: pytest.MonkeyPatch, old_kernel: bool) -> None:
    real, asked = os.memfd_create, []

    def memfd_create(name: str, flags: int) -> int:
        asked.append(flags & segment._MFD_NOEXEC_SEAL)
        if old_kernel and asked[-1]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(name, flags & ~segment._MFD_NOEXEC_SEAL if old_kernel else flags)

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    with segment.SharedSegment.create("x", 4096, peers_may_write=True) as made:
        assert asked == ([8, 0] if old_kernel else [8])
        assert fcntl.fcntl(made.fd, fcntl.F_GET_SEALS) & segment._SIZE_SEALS == segment._SIZE_SEALS
        assert old_kernel or os.fstat(made.fd).st_mode & 0o111 == 0
