"""Processors this process may use, from affinity and from made-up cgroup trees."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from llm_datadist._native import usable_cpus
from llm_datadist._native.cpus import cpu_quota

if TYPE_CHECKING:
    from pathlib import Path


def tree(root: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "membership").write_text(membership)
    return root / "cgroup", root / "membership"


QUOTA, PERIOD = "cpu,cpuacct/cpu.cfs_quota_us", "cpu,cpuacct/cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, 4.0),
        ("0::/a/b\n", {"a/b/cpu.max": "300000 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, None),
        ("0::/gone\n", {}, None),
        ("5:memory:/x\n4:cpu,cpuacct:/docker/7\n", {QUOTA: "250000\n", PERIOD: "100000\n"}, 2.5),
        ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, None),
        ("4:cpuset:/x\n", {"cpuset/x/cpu.max": "100000 100000\n"}, None),
        ("nonsense\n\n", {}, None),
    ],
)
def test_the_lowest_quota_on_the_way_up_counts(
    tmp_path: Path, membership: str, files: dict[str, str], quota: float | None
) -> None:
    assert cpu_quota(*tree(tmp_path, membership, files)) == quota


def test_without_cgroups_there_is_no_quota_and_this_process_may_use_a_cpu_of_its_affinity(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none", tmp_path / "neither") is None
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))
