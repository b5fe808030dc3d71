"""Measure what links cost one process as their number grows, and what pools cost as their size grows.

    python -m benchmarks.measure_growth links [--transport shm tcp] [--links 1 16 64 256 1000] [--processes 8]
                                              [--rounds 3]
    python -m benchmarks.measure_growth pools [--gib 1 4 16] [--rounds 1]

links: an owner listens, in a process of its own. Its peers, each an LLMDataDist with one link to it, are spread over a
few processes. Printed for each number of links, the median round: seconds until all are linked; RssAnon, descriptors
and CPU of the owner's process for each idle link, without what it needs before the first one; pulls of 4 KiB in a
second of all peers; the most pulls of one peer by the fewest. Each hundredth block is compared. In each process of
peers four threads pull, each for its peers in turn: with a thread for each peer it would be their interpreter that
tells them apart.

pools: an owner with a pool of small pages, touched at init, or of huge pages; a peer in another process links over shm
and pulls all blocks of the pool twice, in random order, into a few blocks of its own. Printed: seconds of the owner's
init, of the link and of both passes, and the page tables (VmPTE) that owner and peer have more than before. A size for
which there is too little memory is left out, and said.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import os
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.measure_peers import Peer, close_peers, offer
from faults.harness import Processes, numbered, words_of
from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from llm_datadist._memory.host import available_memory
from llm_datadist.tools.bench.progress import steps
from tests.support.ends import Call
from tests.support.linking import SUCCESS, info, link

if TYPE_CHECKING:
    from tests.support.ends import ChildEnd
    from tests.support.world import World

_KEY: Final = BlocksCacheKey(1, 0)
_PULL_BYTES: Final = 4096
_POOL_BYTES: Final = 16 << 20
#: From the order to the first pull: every process has received the order by then.
_LEAD_S: Final = 1.0
_SETTLE_S: Final = 2.5
_PULLERS: Final = 4
_GIB: Final = 1 << 30
_LANDING_BLOCKS: Final = 64
_SPARE_BYTES: Final = 3 * _GIB


def status_kib(pid: int, field: str) -> int:
    """Return a figure of /proc/PID/status."""
    (kib,) = re.findall(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(kib)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, to the nanosecond, without disturbing it."""
    return time.clock_gettime((~pid << 3) | 2)  # linux/posix-timers.h: the CPU clock of another process


def settle(world: World) -> None:
    """Collect garbage, so that what is counted is in use."""
    gc.collect()


# --- links ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """What came of one round with so many links; figures of the owner's process, for each link."""

    seconds: float  # until all are linked
    rss_kib: float
    descriptors: float
    cpu_percent: float  # of one core, idle
    peers_percent: float  # the same of all peers' processes
    pulls_per_s: float  # of all peers
    fairness: float
    owner_us: float  # CPU for each pull


def make_peers(world: World, numbers: list[int], port: int, transport: str) -> None:
    """At a process of peers: make them, unlinked."""
    world.memory["peers"] = [Peer(number, port, transport, _PULL_BYTES) for number in numbers]


def link_peers(world: World, begin: float, threads: int) -> float:
    """At a process of peers: link all of them from ``begin`` on; return when all were linked (time.monotonic())."""
    time.sleep(max(0.0, begin - time.monotonic()))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(Peer.link, world.memory["peers"]))
    return time.monotonic()


def prepare_peers(world: World) -> None:
    """At a process of peers: pull once from each."""
    for peer in world.memory["peers"]:
        peer.prepare()


def pull_in_turn(world: World, begin: float, end: float) -> list[int]:
    """At a process of peers: have them pull until ``end``, each thread for its peers in turn; return how often each."""
    peers: list[Peer] = world.memory["peers"]
    time.sleep(max(0.0, begin - time.monotonic()))

    def run(mine: list[Peer]) -> list[int]:
        counts = [0] * len(mine)
        while time.monotonic() < end:
            for place, peer in enumerate(mine):
                counts[place] += 1
                peer.pull_once(counts[place])
        return counts

    calls = [Call(run, peers[start::_PULLERS]) for start in range(min(_PULLERS, len(peers)))]
    return [count for call in calls for count in call.result()]


def measure_links(transport: str, count: int, options: argparse.Namespace) -> Growth:
    """Do one round with ``count`` links."""
    extra = {"llm.MaxLinks": str(2 * count)}
    with Processes(transport, _POOL_BYTES, extra=extra) as processes:
        owner: ChildEnd = processes.owner()
        owner.do(offer, _PULL_BYTES)
        crowd: list[ChildEnd] = []
        number_of = min(count, options.processes)
        for number in range(number_of):
            end = processes.process(f"peers {number}")
            end.do(make_peers, list(range(number, count, number_of)), owner.port, transport)
            processes.callback(end.do, close_peers)
            crowd.append(end)
        owner.do(settle)
        before, alone_fds, alone, _ = idle(owner, crowd, options.seconds)
        begin = time.monotonic() + _LEAD_S
        linked = max(do_all(crowd, link_peers, begin, options.threads)) - begin
        time.sleep(_SETTLE_S)
        owner.do(settle)
        rss, descriptors, busy, peers = idle(owner, crowd, options.seconds)
        do_all(crowd, prepare_peers)
        begin, cpu = time.monotonic() + _LEAD_S, cpu_seconds(owner.pid)
        answers: list[list[int]] = do_all(crowd, pull_in_turn, begin, begin + options.seconds)
        cpu = cpu_seconds(owner.pid) - cpu
        pulls = [pull for counts in answers for pull in counts]
        return Growth(
            linked,
            (rss - before) / count,
            (descriptors - alone_fds) / count,
            100 * (busy - alone) / count,
            100 * peers / count,
            sum(pulls) / options.seconds,
            max(pulls) / max(1, min(pulls)),
            1e6 * cpu / sum(pulls),
        )


def do_all(ends: list[ChildEnd], function: Any, *args: Any) -> list[Any]:  # noqa: ANN401
    """Call at all of them at once; return the results."""
    for end in ends:
        end.begin(function, *args)
    return [end.finish(300) for end in ends]


def idle(owner: ChildEnd, crowd: list[ChildEnd], seconds: float) -> tuple[int, int, float, float]:
    """Return RssAnon in KiB and descriptors of the owner, and what part of a core owner and crowd use while idle."""
    pids = [end.pid for end in crowd]
    begin, used, others = time.monotonic(), cpu_seconds(owner.pid), sum(map(cpu_seconds, pids))
    time.sleep(seconds)
    passed = time.monotonic() - begin
    used, others = cpu_seconds(owner.pid) - used, sum(map(cpu_seconds, pids)) - others
    descriptors = len(os.listdir(f"/proc/{owner.pid}/fd"))
    return status_kib(owner.pid, "RssAnon"), descriptors, used / passed, others / passed


def links(options: argparse.Namespace) -> None:
    """Print a row for each transport and number of links."""
    print("transport links linked_s rss_kib descriptors idle_% peers_idle_% pulls/s fairness owner_us/pull load")
    rows = itertools.product(options.links, options.transport)
    for count, transport in steps(rows, lambda row: f"{row[0]} links over {row[1]}", "rows"):
        rounds = [measure_links(transport, count, options) for _ in range(options.rounds)]
        row = [statistics.median(column) for column in zip(*map(astuple, rounds), strict=True)]
        print(transport, count, *(f"{figure:.4g}" for figure in row), os.getloadavg()[0], flush=True)


# --- pools ------------------------------------------------------------------------------------------------------------


def offer_all(world: World, blocks: int, block_bytes: int) -> None:
    """At the owner: one cache as large as the pool; the first word of each block says its number."""
    world.caches["kv"] = world.cm.allocate_blocks_cache(CacheDesc(1, [blocks, block_bytes], DataType.DT_UINT8), _KEY)
    (words,) = words_of(world.caches["kv"])
    words.reshape(blocks, -1)[:, 0] = numbered(1, blocks)


def landing(world: World, block_bytes: int) -> None:
    """At the peer: a cache of few blocks."""
    desc = CacheDesc(1, [_LANDING_BLOCKS, block_bytes], DataType.DT_UINT8)
    world.caches["kv"] = world.cm.allocate_blocks_cache(desc)


def link_timed(world: World, port: int) -> float:
    """At the peer: link; return the seconds."""
    begin = time.monotonic()
    assert link(world, [info(1, port)]) == SUCCESS
    return time.monotonic() - begin


def pull_pool(world: World, blocks: int) -> float:
    """At the peer: pull every block of the owner once, in random order; return the seconds."""
    order: Any = np.random.default_rng(1).permutation(blocks)
    there: Any = np.arange(_LANDING_BLOCKS)
    cache, seconds = world.caches["kv"], 0.0
    (words,) = words_of(cache)
    heads = words.reshape(_LANDING_BLOCKS, -1)[:, 0]
    for start in range(0, blocks, _LANDING_BLOCKS):
        source = order[start : start + _LANDING_BLOCKS]
        begin = time.monotonic()
        world.cm.pull_blocks(_KEY, cache, source, there[: len(source)])
        seconds += time.monotonic() - begin
        assert np.array_equal(heads[: len(source)], source + 1), "wrong bytes"
    return seconds


def measure_pool(gib: int, *, huge: bool, block_bytes: int) -> list[float]:
    """Return init, link, first pass and second pass in seconds, VmPTE of owner and peer in KiB."""
    blocks = gib * _GIB // block_bytes
    pool = f'{{"memory_size": {gib * _GIB}, "huge_pages": {str(huge).lower()}}}'
    with ExitStack() as stack:
        processes = stack.enter_context(Processes("shm", _POOL_BYTES))
        owner, peer = processes.process("owner"), processes.process("peer")
        before = status_kib(owner.pid, "VmPTE")
        begin = time.monotonic()
        extra = {"llm.Transport": "shm", "llm.PoolPrefault": "1"}
        owner.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", mem_pool_cfg=pool, host_mem_pool_cfg=None, extra=extra)
        init = time.monotonic() - begin
        owner.do(offer_all, blocks, block_bytes)
        peer.start("DECODER", 2, host_mem_pool_cfg=None, extra={"llm.Transport": "shm"})
        peer.do(landing, block_bytes)
        processes.callback(peer.stop)
        processes.callback(owner.stop)
        peer_before = status_kib(peer.pid, "VmPTE")
        linked = peer.do(link_timed, owner.port)
        first, second = (peer.do(pull_pool, blocks) for _ in range(2))
        tables = [status_kib(owner.pid, "VmPTE") - before, status_kib(peer.pid, "VmPTE") - peer_before]
        return [init, linked, first, second, *tables]


def pools(options: argparse.Namespace) -> None:
    """Print a row for each size, with small and with huge pages."""
    print("GiB pages init_s link_s first_pass_s second_pass_s owner_VmPTE_KiB peer_VmPTE_KiB load")
    for gib in steps(options.gib, "{} GiB".format, "sizes"):
        free, bound = available_memory()
        if free < gib * _GIB + _SPARE_BYTES:
            print(f"{gib} GiB left out: {free / _GIB:.1f} GiB can be had ({bound})", flush=True)
            continue
        for huge in (False, True):
            rounds = [measure_pool(gib, huge=huge, block_bytes=options.kib << 10) for _ in range(options.rounds)]
            row = [statistics.median(column) for column in zip(*rounds, strict=True)]
            name = "huge" if huge else "small"
            print(gib, name, *(f"{figure:.4g}" for figure in row), os.getloadavg()[0], flush=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("links")
    command.set_defaults(run=links)
    command.add_argument("--transport", choices=("tcp", "shm", "cma", "nixl"), nargs="+", default=["shm", "tcp"])
    command.add_argument("--links", type=int, nargs="+", default=[1, 16, 64, 256, 1000])
    command.add_argument("--processes", type=int, default=8, help="of the peers")
    command.add_argument("--threads", type=int, default=8, help="that link, in each process of peers")
    command.add_argument("--seconds", type=float, default=5, help="of each idle and each busy time")
    command.add_argument("--rounds", type=int, default=3)
    command = commands.add_parser("pools")
    command.set_defaults(run=pools)
    command.add_argument("--gib", type=int, nargs="+", default=[1, 4, 16])
    command.add_argument("--kib", type=int, default=64, help="KiB of a block")
    command.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    options.run(options)
    return 0


if __name__ == "__main__":
    # By its own name: functions go to the other processes by theirs.
    sys.exit(importlib.import_module("benchmarks.measure_growth").main())
