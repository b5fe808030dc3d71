"""Each finding about the host, made real: the check runs where what it looks for is so, and says how to mend it."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_datadist.tools.doctor.finding import Finding, Severity, exit_code, run_checks
from tests.doctor.hosts import distribution, forbid, found, is_, needs

PROBLEM, WARNING = Severity.PROBLEM, Severity.WARNING
DENIED = "Operation not permitted"
_PRCTL = "import ctypes; assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0"  # PR_SET_THP_DISABLE
_AFFINITY = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
MOUNTS, NO_NET = {"inside": "unshare -m"}, {"inside": "unshare -n"}
_NOBODY = MOUNTS | {"preparation": "os.setresuid(65534, 65534, 65534)"}
_YAMA = "cd /proc/sys; mount -t tmpfs none kernel; mkdir kernel/yama; echo 1 > kernel/yama/ptrace_scope"
_STRICT = "mount -t tmpfs none /mnt; echo 2 > /mnt/mode; mount --bind /mnt/mode /proc/sys/vm/overcommit_memory"
_BUFFERS = 'echo "4096 65536 131072" > /proc/sys/net/ipv4/tcp_rmem'
_VLLM = {"installed": "vllm 0.11.0", "preparation": "sys.path[:] = sys.path[1:2]"}  # and nothing else
# Replaced, because a Python whose own ssl needs the same file does not start without it.
_NO_OPENSSL = (
    "from llm_datadist._native import _limits; from llm_datadist.errors import ParamError\n"
    "def gone(): raise ParamError('libcrypto.so.3 cannot be used')\n"
    "_limits.cipher_library = gone"
)
_TWO = "open-datadist 0.0.1, open-datadist 0.0.2"
#: The check, what surrounds it, and its finding.
FINDINGS: list[tuple[str, dict[str, str], Severity, str, str]] = [
    ("kernel", {"inside": "setarch --uname-2.6"}, PROBLEM, "2.6.", "boot Linux 6.5"),
    ("memfd", {"forbidden": "memfd_create"}, PROBLEM, DENIED, "seccomp=PROFILE.json"),
    ("pidfd", {"forbidden": "pidfd_open"}, PROBLEM, DENIED, "seccomp=PROFILE.json"),
    ("process_vm_readv", {"forbidden": "process_vm_readv"}, WARNING, DENIED, "--cap-add SYS_PTRACE"),
    ("yama", _NOBODY | {"shell": _YAMA}, WARNING, "ptrace_scope 1", "sysctl -w kernel.yama.ptrace_scope=0"),
    ("user_namespace", {"inside": "unshare -Ur"}, WARNING, "one of its own", "--userns=host"),
    ("huge_pages", {"preparation": _PRCTL}, WARNING, "huge_pages is true, but", "shmem_enabled"),
    ("descriptors", {"shell": "ulimit -n 200"}, PROBLEM, "RLIMIT_NOFILE 200", "ulimit -n 65536"),
    ("descriptors", {"shell": "ulimit -n 1024"}, WARNING, "RLIMIT_NOFILE 1024", "ulimit -n 65536"),
    ("address_space", {"shell": "ulimit -v 16000000"}, WARNING, "16384000000", "ulimit -v unlimited"),
    ("memlock", {"shell": "ulimit -l 64", "installed": "nixl 1.0"}, WARNING, "65536 bytes", "ulimit -l unlimited"),
    ("overcommit", MOUNTS | {"shell": _STRICT}, WARNING, "overcommit_memory 2", "sysctl -w vm.overcommit_memory=0"),
    ("cpus", {"preparation": _AFFINITY}, WARNING, "1 usable, 1 by affinity", "taskset -pc"),
    ("copies", {}, Severity.OK, " bytes of the next run are prefetched", ""),
    ("loopback", NO_NET, PROBLEM, "Network is unreachable", "ip link set lo up"),
    ("tcp_buffers", NO_NET | {"shell": _BUFFERS}, WARNING, "tcp_rmem up to 128 KiB", "sysctl -w net.ipv4.tcp_rmem="),
    ("library", {"installed": _TWO.replace("-", "_")}, WARNING, _TWO, "pip uninstall open-datadist"),
    ("cipher", {}, Severity.OK, "AES-256-GCM, ", ""),
    ("cipher", {"preparation": _NO_OPENSSL}, WARNING, "libcrypto.so.3 cannot be used", "apt install libssl3"),
    ("nixl", {"installed": "nixl_cu12 1.2.3"}, Severity.OK, "nixl-cu12 1.2.3", ""),
    ("vllm", _VLLM, WARNING, "vllm 0.11.0, without aiohttp", "pip install 'open-datadist[vllm]'"),
]


@pytest.mark.parametrize(("name", "around", "state", "value", "mend"), FINDINGS, ids=[row[0] for row in FINDINGS])
def test_a_finding_says_what_is_so_and_how_to_mend_it(
    name: str, around: dict[str, str], state: Severity, value: str, mend: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**around}
    if "inside" in around:
        settings["inside"] = needs(*around["inside"].split())
    if "forbidden" in around:
        settings = {"preparation": forbid(around["forbidden"])}
    for each in filter(None, settings.pop("installed", "").split(", ")):
        settings["path"] = distribution(tmp_path, *each.split())
    is_(found(name, **settings), state, value, mend)


def test_the_cipher_has_a_speed_and_the_openssl_that_is_loaded() -> None:
    shape = r"AES-256-GCM, [\d.e+]+ GB/s on one core, OpenSSL 3\.[^,]+, (/.*libcrypto\.so\.3)"
    value = found("cipher").value
    matched = re.fullmatch(shape, value)
    assert matched is not None, value
    assert Path(matched[1]).is_file()


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    root = Path("/sys/fs/cgroup")
    old = (root / "memory").is_dir()
    folder = root / ("memory" if old else "") / f"llm-datadist-doctor-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(512 << 20))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no cgroup can be made here: {error}")
    yield folder
    folder.rmdir()


def test_small_cgroup(small_cgroup: Path) -> None:
    finding = found("cgroup_memory", shell=f"echo $$ > {small_cgroup}/cgroup.procs")
    is_(finding, Severity.WARNING, "512 MiB", "docker update --memory")


def test_two_numa_nodes() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one processor is on one node only")
    nodes = "/sys/devices/system/node"
    shell = f"mount -t tmpfs none {nodes}; mkdir {nodes}/node0 {nodes}/node1"
    shell += f"; echo {cpus[0]} > {nodes}/node0/cpulist; echo {cpus[1]} > {nodes}/node1/cpulist"
    finding = found("numa", inside=needs("unshare", "-m"), shell=shell)
    is_(finding, Severity.WARNING, "2 of 2 nodes: node0, node1", "numactl --cpunodebind=0")


def test_cuda_without_a_driver(tmp_path: Path) -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("there is a driver")
    finding = found("cuda", path=distribution(tmp_path, "nvidia_cuda_runtime_cu12", "12.8.90"))
    is_(finding, Severity.WARNING, "nvidia-cuda-runtime-cu12 12.8.90, no driver", "docker run --gpus all")


def test_check_that_cannot_be_made_is_an_unknown_finding_and_the_worst_finding_gives_the_exit_code() -> None:
    def blocked() -> Finding:
        raise PermissionError(1, "Operation not permitted", "/proc/x")

    def good() -> Finding:
        return Finding("good", Severity.OK, "", "")

    def bad() -> Finding:
        return Finding("bad", Severity.PROBLEM, "", "", "mend")

    (unknown,) = run_checks([blocked])
    is_(unknown, Severity.UNKNOWN, "/proc/x", "as root")
    codes = [exit_code(run_checks(checks)) for checks in ([], [good], [good, blocked], [blocked, bad, good])]
    assert codes == [0, 0, 1, 2]
