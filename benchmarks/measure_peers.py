"""Measure how many small pulls one owner serves in a second, and whether its peers get the same share.

    python -m benchmarks.measure_peers [--transport tcp shm] [--peers 48] [--processes 48] [--seconds 3] [--rounds 3]

Each peer is an LLMDataDist with a link of its own and one thread, and pulls one block again and again, another one each
time, from a blocks cache that was resolved before. The peers are spread over --processes processes beside that of the
owner. The transports take turns; those that wait are stopped. Every word of the owner's cache says where it is; each
peer compares each hundredth block that it pulls, and the last, with its memory cleared before. Prints the median, the
lowest and the highest of all rounds: pulls per second of all peers; the most pulls of one peer by the fewest of one
("fairness"), and the ninth decile by the first; the most CPU seconds of one process of peers by the fewest of one; the
CPU seconds of the owner and of all peers for each 1000 pulls.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

import numpy as np

from faults.harness import Processes, numbered, words_of
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMDataDist, LLMRole
from llm_datadist.tools.bench.progress import steps
from tests.support.ends import Call
from tests.support.linking import SUCCESS, info
from tests.support.world import make_config

if TYPE_CHECKING:
    from tests.support.ends import ChildEnd
    from tests.support.world import World

_KEY: Final = BlocksCacheKey(1, 0)
_ROWS: Final = 1024
_BASE: Final = 1 << 48
_COMPARE_EACH: Final = 100
#: From the order to the first pull: every process has received the order by then.
_LEAD_S: Final = 0.5
_WORD_BYTES: Final = 8
#: A process that is stopped while it is not its turn is not taken for dead.
_PATIENT: Final = {"llm.PeerTimeout": "600"}


class Peer:
    """One LLMDataDist that pulls from the owner, into memory of one block."""

    def __init__(self, number: int, port: int, transport: str, block_bytes: int) -> None:
        self._number = number
        self._words = np.zeros(block_bytes // _WORD_BYTES, np.uint64)
        self._end = LLMDataDist(LLMRole.DECODER, 100 + number)
        extra = {"llm.Transport": transport, **_PATIENT}
        self._end.init(make_config(mem_pool_cfg=None, host_mem_pool_cfg=None, extra=extra))
        self._owner = info(1, port)
        desc = CacheDesc(1, [1, block_bytes], DataType.DT_UINT8)
        self._mine = self._end.cache_manager.register_blocks_cache(desc, [self._words.ctypes.data])

    def link(self) -> None:
        """Link to the owner."""
        if (codes := self._end.link_clusters([self._owner], 10_000)) != SUCCESS:
            raise RuntimeError(f"peer {self._number} cannot link: {codes}")

    def prepare(self) -> None:
        """Pull once, so that the owner's cache is resolved."""
        self._pull_compared(0)

    def pull(self, begin: float, end: float) -> int:
        """Pull from ``begin`` to ``end`` (time.monotonic()); return how often."""
        count = 0
        time.sleep(max(0.0, begin - time.monotonic()))
        while time.monotonic() < end:
            count += 1
            self.pull_once(count)
        self._pull_compared(self._number % _ROWS)
        return count

    def pull_once(self, count: int) -> None:
        """Pull the next block, for the time ``count`` says."""
        row = (self._number + count) % _ROWS
        if count % _COMPARE_EACH:
            self._end.cache_manager.pull_blocks(_KEY, self._mine, [row], [0])
        else:
            self._pull_compared(row)

    def _pull_compared(self, row: int) -> None:
        self._words[:] = 0
        self._end.cache_manager.pull_blocks(_KEY, self._mine, [row], [0])
        if not np.array_equal(self._words, numbered(_BASE + row * len(self._words), len(self._words))):
            raise RuntimeError(f"wrong bytes in block {row} at peer {self._number}")

    def close(self) -> None:
        """Unlink and finalize."""
        self._end.unlink_clusters([self._owner], 10_000)
        self._end.finalize()


def offer(world: World, block_bytes: int) -> None:
    """At the owner: make the cache; every word says where it is."""
    world.caches["kv"] = world.cm.allocate_blocks_cache(CacheDesc(1, [_ROWS, block_bytes], DataType.DT_UINT8), _KEY)
    (words,) = words_of(world.caches["kv"])
    words[:] = numbered(_BASE, len(words))


def make_peers(world: World, numbers: list[int], port: int, transport: str, block_bytes: int) -> None:
    """At a process of peers: make and link them."""
    world.memory["peers"] = [Peer(number, port, transport, block_bytes) for number in numbers]
    for peer in world.memory["peers"]:
        peer.link()
        peer.prepare()


def close_peers(world: World) -> None:
    """At a process of peers: end them."""
    for peer in world.memory.pop("peers"):
        peer.close()


def pull_all(world: World, begin: float, end: float) -> tuple[list[int], float]:
    """At a process of peers: have all of them pull; return how often each, and the CPU seconds of the process."""
    before = time.process_time()
    calls = [Call(peer.pull, begin, end) for peer in world.memory["peers"]]
    time.sleep(max(0.0, end - time.monotonic()))  # who asks for results waits at most a minute for them
    return [call.result() for call in calls], time.process_time() - before


def cpu_seconds(world: World) -> float:
    """Return the CPU seconds of the process."""
    return time.process_time()


@dataclass(frozen=True)
class Turn:
    """What came of one turn."""

    pulls_per_s: float
    fairness: float
    deciles: float  # the ninth by the first
    cpu_share: float  # most by fewest CPU seconds of the processes of peers
    owner_cpu: float  # seconds for each 1000 pulls
    peers_cpu: float


class Scene:
    """An owner and its peers, over one transport."""

    def __init__(self, processes: Processes, transport: str, options: argparse.Namespace) -> None:
        nbytes = options.kib << 10
        self._owner: ChildEnd = processes.owner()
        self._owner.do(offer, nbytes)
        self._crowd: list[ChildEnd] = []
        for number in range(options.processes):
            end = processes.process(f"peers {number}")
            numbers = list(range(number, options.peers, options.processes))
            end.do(make_peers, numbers, self._owner.port, transport, nbytes)
            processes.callback(end.do, close_peers)
            self._crowd.append(end)

    @property
    def pids(self) -> list[int]:
        """The process ids, that of the owner first."""
        return [each.pid for each in (self._owner, *self._crowd)]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes."""
        for pid in self.pids:
            os.kill(pid, number)

    def turn(self, seconds: float) -> Turn:
        """Have all peers pull for so long."""
        begin = time.monotonic() + _LEAD_S
        before = self._owner.do(cpu_seconds)
        for end in self._crowd:
            end.begin(pull_all, begin, begin + seconds)
        answers = [end.finish(seconds + 60) for end in self._crowd]
        owner_cpu = self._owner.do(cpu_seconds) - before
        pulls, cpu = sorted(count for counts, _ in answers for count in counts), [cpu for _, cpu in answers]
        thousands, tenth = sum(pulls) / 1000, len(pulls) // 10
        return Turn(
            pulls_per_s=sum(pulls) / seconds,
            fairness=pulls[-1] / max(1, pulls[0]),
            deciles=pulls[-1 - tenth] / max(1, pulls[tenth]),
            cpu_share=max(cpu) / max(1e-3, min(cpu)),
            owner_cpu=owner_cpu / thousands,
            peers_cpu=sum(cpu) / thousands,
        )


def _show(transport: str, turns: list[Turn], options: argparse.Namespace) -> None:
    print(f"{transport}: {options.peers} peers in {options.processes} processes, {options.kib} KiB")
    for field in fields(Turn):
        found = sorted(getattr(turn, field.name) for turn in turns)
        print(f"  {field.name:<12} {found[len(found) // 2]:10.4g}  ({found[0]:.4g} to {found[-1]:.4g})")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("tcp", "shm", "cma"), nargs="+", default=["tcp", "shm"])
    parser.add_argument("--peers", type=int, default=48)
    parser.add_argument("--processes", type=int, default=48, help="of the peers")
    parser.add_argument("--kib", type=int, default=4, help="KiB of a block")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    pool_bytes = 2 * _ROWS * options.kib << 10
    with ExitStack() as stack:
        scenes = {}
        for transport in options.transport:
            extra = {"llm.MaxLinks": str(4 * options.peers), **_PATIENT}
            processes = stack.enter_context(Processes(transport, pool_bytes, extra=extra))
            scenes[transport] = scene = Scene(processes, transport, options)
            processes.callback(scene.signal, signal.SIGCONT)
            scene.signal(signal.SIGSTOP)
            print(f"{transport}: the owner is process {scene.pids[0]}", flush=True)
        turns: dict[str, list[Turn]] = {transport: [] for transport in scenes}
        for transport in steps([*scenes] * options.rounds, unit="turns"):
            scene = scenes[transport]
            scene.signal(signal.SIGCONT)
            turns[transport].append(scene.turn(options.seconds))
            scene.signal(signal.SIGSTOP)
        for transport, found in turns.items():
            _show(transport, found, options)
    return 0


if __name__ == "__main__":
    # By its own name: functions go to the other processes by theirs.
    sys.exit(importlib.import_module("benchmarks.measure_peers").main())
