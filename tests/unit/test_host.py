"""What this process may use: CPUs by its affinity and cgroup, memory by its host and cgroup."""

import os
from pathlib import Path

import pytest

from llm_datadist._memory.host import available_memory, host_memory_limit
from llm_datadist._native import usable_cpus
from llm_datadist._native.cpus import cpu_quota


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


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
def test_the_lowest_quota_counts(tmp_path: Path, membership: str, files: dict[str, str], quota: float | None) -> None:
    write(tmp_path / "cgroup", files)
    write(tmp_path, {"membership": membership})
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "membership") == quota


def test_without_cgroups_there_is_no_quota_and_this_process_may_use_a_cpu_of_its_affinity(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none", tmp_path / "neither") is None
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))


# Memory

MIB = 1 << 20
V1_LIMIT, V1_NO_LIMIT = "memory.limit_in_bytes", str((1 << 63) - 4096)
OUTSIDE = {f"../outside/{V1_LIMIT}": "1", f"not/under/root/{V1_LIMIT}": "1", V1_LIMIT: str(5 * MIB)}
V2 = "0::/a/b\n", "35 24 0:30 / {top} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def v1(root: str, group: str) -> tuple[str, str]:
    mount = "36 24 0:31 {root} {top} rw - cgroup cgroup rw,memory\n37 24 0:32 / /elsewhere rw - cgroup cgroup rw,cpu\n"
    groups = "12:cpu,cpuacct:/other\n4:hugetlb,memory:{group}\n1:name=memories:/memory\n0::/\n"
    return groups.replace("{group}", group), mount.replace("{root}", root)


@pytest.mark.parametrize(
    ("told", "limits", "setter"),  # what procfs tells of groups and mounts, the files of limits, the one that counts
    [
        (("", ""), {}, None),
        (V2, {"a/b/memory.max": "max", "a/memory.max": "max"}, None),
        (V2, {"a/b/memory.max": str(MIB), "a/memory.max": "max"}, "a/b/memory.max"),
        (V2, {"a/b/memory.max": "max", "a/memory.max": str(2 * MIB)}, "a/memory.max"),
        (V2, {"a/b/memory.max": str(8 * MIB), "memory.max": str(3 * MIB)}, "memory.max"),
        (V2, {"a/b/memory.max": str(64 * MIB)}, None),
        (V2, {"c/memory.max": "1"}, None),
        (v1("/", "/x/job"), {f"x/job/{V1_LIMIT}": V1_NO_LIMIT, f"x/{V1_LIMIT}": str(MIB)}, f"x/{V1_LIMIT}"),
        (v1("/", "/x/job"), {f"x/job/{V1_LIMIT}": str(MIB), f"x/{V1_LIMIT}": V1_NO_LIMIT}, f"x/job/{V1_LIMIT}"),
        (v1("/docker/x", "/docker/x/job"), {f"job/{V1_LIMIT}": V1_NO_LIMIT, V1_LIMIT: str(MIB)}, V1_LIMIT),
        (v1("/docker/x", "/docker/x/job"), {f"job/{V1_LIMIT}": str(MIB), V1_LIMIT: V1_NO_LIMIT}, f"job/{V1_LIMIT}"),
        (v1("/", "/../outside"), OUTSIDE, V1_LIMIT),  # outside of the mount: the limit is the one at its top
        (v1("/docker/x", "/not/under/root"), OUTSIDE, V1_LIMIT),
    ],
)
def test_the_smallest_of_the_host_the_group_and_its_ancestors_counts_also_where_only_a_subtree_is_mounted(
    tmp_path: Path, told: tuple[str, str], limits: dict[str, str], setter: str | None
) -> None:
    top = write(tmp_path / "cgroup fs", {path: text + "\n" for path, text in limits.items()})
    mounts = told[1].replace("{top}", str(top).replace(" ", "\\040"))
    meminfo = "MemTotal:       16384 kB\nMemFree:        1 kB\n"
    proc = write(tmp_path / "proc", {"self/cgroup": told[0], "self/mountinfo": mounts, "meminfo": meminfo})
    expected = (16 * MIB, "host memory") if setter is None else (int(limits[setter]), f"cgroup limit {top / setter}")
    assert host_memory_limit(proc) == expected


def test_the_real_limit_is_no_more_than_physical_memory(tmp_path: Path) -> None:
    write(tmp_path, {"meminfo": "MemFree: 1 kB\n"})
    with pytest.raises(OSError, match="no MemTotal"):
        host_memory_limit(tmp_path)
    nbytes, source = host_memory_limit()
    assert 0 < nbytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert source


MEMINFO = "MemTotal: 1000 kB\nMemAvailable: 600 kB\nSwapFree: 100 kB\nCommitLimit: 800 kB\nCommitted_AS: 300 kB\n"
LIMITED = {"memory.max": "500000", "memory.current": "400000", "memory.stat": "anon 1\ninactive_file 50000"}


@pytest.mark.parametrize(
    ("overcommit", "cgroup", "free", "source"),
    [
        ("0", {}, 700 * 1024, "MemAvailable"),
        ("2", {}, 500 * 1024, "CommitLimit"),
        ("0", LIMITED, 150_000, "memory.max"),
        ("0", LIMITED | {"memory.stat": ""}, 100_000, "memory.max"),
        ("0", {"memory.max": "300000", "memory.current": "100000"}, 200_000, "memory.max"),
        ("0", LIMITED | {"memory.current": "700000"}, 0, "memory.max"),
        ("0", {"memory.max": "max"}, 700 * 1024, "MemAvailable"),
    ],
)
def test_the_tightest_bound_is_what_can_still_be_had(
    tmp_path: Path, overcommit: str, cgroup: dict[str, str], free: int, source: str
) -> None:
    job = write(tmp_path / "cg/job", cgroup)
    mounts = f"30 20 0:26 / {tmp_path}/cg rw - cgroup2 cgroup2 rw\n"
    proc = {"meminfo": MEMINFO, "self/cgroup": "0::/job\n", "self/mountinfo": mounts}
    found, bound = available_memory(write(tmp_path, proc | {"sys/vm/overcommit_memory": f"{overcommit}\n"}))
    assert found == free
    assert bound in (source, f"cgroup limit {job}/{source}")
