"""Limits of this process and its cgroup."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path
from typing import Final

from llm_datadist._memory.host import cgroup_limits
from llm_datadist._native import copy_rule, usable_cpus
from llm_datadist.tools.doctor.finding import Finding, Severity, judge
from llm_datadist.tools.doctor.versions import installed

_FEW_DESCRIPTORS: Final = 4096
_TOO_FEW_DESCRIPTORS: Final = 256
_LOCKED: Final = 64 << 20
_CGROUP_BYTES: Final = 1 << 30
_BUFFER: Final = 4 << 20
_NODES: Final = Path("/sys/devices/system/node")
_UNLIMITED: Final = 1 << 60  # cgroup v1 writes a number near 2**63


def descriptors() -> Finding:
    """Check RLIMIT_NOFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    meaning = "a link takes several descriptors: sockets, data lanes, a pidfd; where none is left, linking fails"
    value = f"RLIMIT_NOFILE {soft}, at most {hard}"
    good = soft == resource.RLIM_INFINITY or soft >= _FEW_DESCRIPTORS
    bad = Severity.WARNING if soft >= _TOO_FEW_DESCRIPTORS else Severity.PROBLEM
    return judge("descriptors", good, value, meaning, "ulimit -n 65536 (docker run --ulimit nofile=65536)", bad)


def memlock() -> Finding:
    """Check RLIMIT_MEMLOCK, if NIXL is installed."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    value = "RLIMIT_MEMLOCK " + ("unlimited" if unlimited else f"{soft} bytes")
    meaning = "NIXL locks memory, the pools that are registered for RDMA; so may GPUs, if gpu_pinning is shown below"
    good = unlimited or soft >= _LOCKED or not installed("nixl")
    return judge("memlock", good, value, meaning, "ulimit -l unlimited (docker run --ulimit memlock=-1)")


def address_space() -> Finding:
    """Check RLIMIT_AS."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    meaning = "the pools of every shm peer are mapped here too; beyond the limit links are made over tcp or fail"
    unlimited = soft == resource.RLIM_INFINITY
    value = "unlimited" if unlimited else f"RLIMIT_AS {soft} bytes"
    return judge("address_space", unlimited, value, meaning, "ulimit -v unlimited")


def overcommit() -> Finding:
    """Check vm.overcommit_memory."""
    mode = Path("/proc/sys/vm/overcommit_memory").read_text().strip()
    meaning = "with 2 the whole of a pool counts against the commit limit at init, which then fails earlier"
    value, mend = f"vm.overcommit_memory {mode}", "sysctl -w vm.overcommit_memory=0"
    return judge("overcommit", mode != "2", value, meaning, mend)


def cgroup_memory() -> Finding:
    """Find the lowest memory limit of this cgroup and its ancestors."""
    limits = [limit for _, limit in cgroup_limits(Path("/proc")) if limit < _UNLIMITED]
    meaning = "pools larger than this are refused by init; pages of pools count in the cgroup that touches them first"
    value = f"{min(limits) >> 20} MiB" if limits else "no limit"
    mend = "docker update --memory 8g CONTAINER (or: echo 8G > /sys/fs/cgroup/GROUP/memory.max)"
    return judge("cgroup_memory", all(limit >= _CGROUP_BYTES for limit in limits), value, meaning, mend)


def cpus() -> Finding:
    """Count this process's processors."""
    usable, allowed, all_of_them = usable_cpus(), len(os.sched_getaffinity(0)), os.cpu_count() or 1
    value = f"{usable} usable, {allowed} by affinity, {all_of_them} in the host"
    meaning = (
        "copies use this many threads unless llm.CopyThreads is set; with one, a transfer and the model take turns"
    )
    return judge("cpus", usable > 1, value, meaning, "taskset -pc 0-3 PID, or docker update --cpus 4 CONTAINER")


def copies() -> Finding:
    """Say how copies of mapped memory choose between streaming stores and stores through the caches."""
    bits, above, least, ahead = copy_rule()
    rule = f"streaming stores of {bits} bits above {above >> 10} KiB, for runs of {least} bytes or more"
    meaning = (
        "inproc, shm, copies and swaps: streaming stores bypass the caches, so large ones are faster and the model's "
        "data stays there"
    )
    value = f"{rule if bits else 'no streaming stores'}; {ahead} bytes of the next run are prefetched"
    return Finding("copies", Severity.OK, value, meaning)


def numa() -> Finding:
    """Check whether this process may run on several NUMA nodes."""
    own = os.sched_getaffinity(0)
    lists = {path.parent.name: path.read_text() for path in _NODES.glob("node[0-9]*/cpulist")}
    used = sorted(name for name, text in lists.items() if own & _parse_cpus(text))
    meaning = "a pool lies on the node of the thread that touches it first; copies between nodes are slower"
    value = f"{len(used)} of {max(1, len(lists))} nodes" + (f": {', '.join(used)}" if used else "")
    return judge("numa", len(used) < 2, value, meaning, "numactl --cpunodebind=0 --membind=0 COMMAND")


def _parse_cpus(text: str) -> set[int]:
    """Parse ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def tcp_buffers() -> Finding:
    """Check the largest socket buffers."""
    most = {name: int(Path(f"/proc/sys/net/ipv4/{name}").read_text().split()[2]) for name in ("tcp_rmem", "tcp_wmem")}
    value = ", ".join(f"{name} up to {size >> 10} KiB" for name, size in most.items())
    meaning = "one data lane moves at most a buffer per round trip: small ones slow tcp down between hosts"
    mend = 'sysctl -w net.ipv4.tcp_rmem="4096 131072 16777216" net.ipv4.tcp_wmem="4096 65536 16777216"'
    return judge("tcp_buffers", min(most.values()) >= _BUFFER, value, meaning, mend)


def loopback() -> Finding:
    """Connect to a listener over 127.0.0.1."""
    meaning = "links are made over tcp, those inside the host over loopback"
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=5).close()
    except OSError as error:
        return Finding("loopback", Severity.PROBLEM, error.strerror or str(error), meaning, "ip link set lo up")
    return Finding("loopback", Severity.OK, "connected", meaning)


CHECKS: Final = (
    descriptors,
    memlock,
    address_space,
    overcommit,
    cgroup_memory,
    cpus,
    copies,
    numa,
    tcp_buffers,
    loopback,
)
