"""How much memory this host, or the cgroup of this process, has left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from llm_datadist._memory.host import available_memory

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("limit", "found", "what"), [("max\n", 500 << 10, "MemAvailable"), ("300000\n", 200_000, "memory.max")]
)
def test_memory_is_what_the_host_has_left_or_the_cgroup(tmp_path: Path, limit: str, found: int, what: str) -> None:
    group = tmp_path / "group"
    for folder in (group, tmp_path / "self"):
        folder.mkdir()
    (group / "memory.max").write_text(limit)
    (group / "memory.current").write_text("100000")
    (tmp_path / "meminfo").write_text("MemTotal: 1000000 kB\nMemAvailable: 500 kB\n")
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    (tmp_path / "self" / "mountinfo").write_text(f"1 1 0:1 / {group} rw - cgroup2 cgroup2 rw\n")
    nbytes, source = available_memory(tmp_path)
    assert nbytes == found
    assert source.endswith(what)
