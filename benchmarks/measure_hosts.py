"""Measure pull_blocks and push_blocks over tcp between two network namespaces, beside the best raw TCP stream there.

    python -m benchmarks.measure_hosts [--kib 64 256 1024] [--mib 256] [--passes 5] [--share-cpus]

The two namespaces are joined by one veth pair. Each has half of the CPUs, because two hosts share none: where both ends
of a raw stream run on one CPU, what was sent is still in its cache when it is received. What runs in the namespaces are
the workers of ``llm-datadist bench``, with its method: contenders take turns, those that wait are stopped, every byte
is compared. Needs root or user namespaces, iproute2 and util-linux.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from llm_datadist.config import INSECURE_VARIABLE
from llm_datadist.tools.bench.cases import Request, cases_of, size_text
from llm_datadist.tools.bench.contenders.base import ENV_HOST, Role
from llm_datadist.tools.bench.driver import run
from llm_datadist.tools.bench.processes import Build
from llm_datadist.tools.bench.report import BenchReporter
from llm_datadist.tools.bench.workload import Op
from tests.hosts.network import Namespace, first_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

_ADDRESSES: Final = {Role.SOURCE: "10.99.0.1", Role.DESTINATION: "10.99.0.2"}
_TIMEOUT_S: Final = 120.0


@contextmanager
def hosts() -> Iterator[dict[Role, Namespace]]:
    """Make two network namespaces that one veth pair joins; end them afterwards."""
    source = first_namespace()
    destination = Namespace(source.within)
    try:
        source.ip(f"link add eth0 type veth peer name eth0 netns {destination.pid}")
        made = {Role.SOURCE: source, Role.DESTINATION: destination}
        for role, host in made.items():
            host.ip(f"address add {_ADDRESSES[role]}/24 dev eth0", "link set eth0 up")
        yield made
    finally:
        destination.close()
        source.close()


def commands(made: dict[Role, Namespace], *, share_cpus: bool) -> dict[Role, list[str]]:
    """Return the beginning of a command that runs the rest of it at a host."""
    if share_cpus:
        return {role: host.enter for role, host in made.items()}
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < len(made):
        raise SystemExit("one CPU cannot be divided between two hosts: use --share-cpus")
    half = len(cpus) // len(made)
    shares = (cpus[:half], cpus[half:])
    return {
        role: [*host.enter, "taskset", "-c", ",".join(map(str, share))]
        for (role, host), share in zip(made.items(), shares, strict=True)
    }


def main() -> int:
    """Measure and print; 1 when a contender failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 256, 1024], help="KiB of a block")
    parser.add_argument("--mib", type=int, default=256, help="MiB of one transfer")
    parser.add_argument("--passes", type=int, default=5, help="after the first")
    parser.add_argument("--share-cpus", action="store_true", help="let both hosts use all CPUs")
    options = parser.parse_args()
    cases = [
        case
        for kib in options.kib
        for op in (Op.PULL, Op.PUSH)
        for case in cases_of(
            Request(
                op=op,
                transport="tcp",
                block_bytes=kib << 10,
                set_bytes=options.mib << 20,
                passes=options.passes,
                against=("tcp-raw",),
            )
        )
    ]
    with hosts() as made, BenchReporter(sys.stderr) as reporter:
        reporter.take(cases)
        environment = {**os.environ, ENV_HOST: _ADDRESSES[Role.SOURCE], INSECURE_VARIABLE: "1"}
        build = Build(environment=environment, within=commands(made, share_cpus=options.share_cpus))
        results = run(cases, reporter, _TIMEOUT_S, build)
    for row in results.rows:
        low, high = (row.bytes / seconds / 1e9 for seconds in (row.seconds_max, row.seconds_min))
        print(
            f"{row.op} {size_text(row.block_bytes):>8}: {row.gb_per_s:.2f} GB/s ({low:.2f} to {high:.2f}), "
            f"{row.cpu_seconds_per_gib:.2f} CPU s/GiB; raw {row.limit_gb_per_s:.2f} GB/s, "
            f"{row.limit_cpu_seconds_per_gib:.2f} CPU s/GiB, by {row.limit}; ratio {row.ratio_to_limit:.2f}"
        )
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
