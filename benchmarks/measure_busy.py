"""Measure what a busy Python thread at either end does to the latency of a pull of 64 KiB.

    python -m benchmarks.measure_busy [--kib 64] [--pulls 16] [--rounds 3] [--intervals-ms 5 0.5 0.05]

Two processes over shm. Three kinds of pulls: one block of a blocks cache that was resolved before ("kept": no message),
the same cache for the first time ("first": one request), a cache by its key (one request, one notification). A thread
that counts in pure Python runs nowhere, at the initiator, at the target, or in a third process; the interpreters switch
threads after each of the intervals (``sys.setswitchinterval``; 5 ms is Python's own). All combinations take turns in
every round. Before each turn the source has new bytes and the destination is poisoned, after it every byte is compared.
Prints medians and ninth deciles in microseconds.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import statistics
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.two_ends import two_ends
from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType
from llm_datadist.tools.bench.progress import steps
from llm_datadist.views import tensor_views
from tests.support.busy import Busy
from tests.support.ends import ChildEnd

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.support.world import World

KINDS: Final = ("kept", "first", "by key")
PLACES: Final = ("nobody", "initiator", "target", "a third process")
_POISON: Final = 0xA5


def publish(world: World, kind: str, pulls: int, nbytes: int, seed: int) -> None:
    """Make what one turn pulls: one blocks cache ("kept"), several ("first"), or caches by key."""
    withdraw(world)
    for number in range(pulls):
        if kind == "by key":
            cache = world.cm.allocate_cache(
                CacheDesc(1, [1, nbytes], DataType.DT_UINT8), [CacheKey(1, seed * pulls + number)]
            )
        elif kind == "first" or number == 0:
            rows = 1 if kind == "first" else pulls
            desc = CacheDesc(1, [rows, nbytes], DataType.DT_UINT8)
            cache = world.cm.allocate_blocks_cache(desc, BlocksCacheKey(1, seed * pulls + number))
        else:
            break
        world.caches[f"{number}"] = cache
    for number, row in enumerate(_rows(world)):
        row[:] = _pattern(seed + number, nbytes)


def withdraw(world: World) -> None:
    """Give back what the last turn made."""
    for cache in world.caches.values():
        (world.cm.deallocate_blocks_cache if cache.is_blocks_cache else world.cm.deallocate_cache)(cache)
    world.caches.clear()


def set_busy(world: World, busy: bool, interval: float) -> None:
    """Start or stop the counting thread, and set the switch interval in seconds."""
    sys.setswitchinterval(interval)
    running = world.memory.pop("busy", None)
    if running is not None:
        running.end()
    if busy:
        world.memory["busy"] = Busy()


def _rows(world: World) -> list[NDArray[np.uint8]]:
    return [row for cache in world.caches.values() for row in tensor_views(cache)[0]]


def _pattern(seed: int, nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@dataclass
class Bench:
    """The processes, and what was measured: seconds by (kind, place, interval)."""

    target: ChildEnd
    third: ChildEnd
    here: World
    pulls: int
    nbytes: int
    found: dict[tuple[str, str, float], list[float]] = field(default_factory=dict)
    _seed: int = 0

    def turn(self, kind: str, place: str, interval: float) -> None:
        """Pull so many times, and compare."""
        self._seed += 1
        self.target.do(publish, kind, self.pulls, self.nbytes, self._seed)
        rows = tensor_views(self.here.caches["dst"])[0]
        rows[:] = _POISON
        self._pull(kind, 0)  # resolves what "kept" needs; once more below
        self._be_busy(place, interval)
        try:
            times = [self._timed(kind, number) for number in range(kind != "kept", self.pulls)]
        finally:
            self._be_busy("nobody", 0.005)
        for number, row in enumerate(rows):
            if not np.array_equal(row, _pattern(self._seed + number, self.nbytes)):
                raise SystemExit(f"wrong bytes in pull {number} of {kind}")
        self.found.setdefault((kind, place, interval), []).extend(times)

    def _be_busy(self, place: str, interval: float) -> None:
        set_busy(self.here, place == "initiator", interval)
        self.target.do(set_busy, place == "target", interval)
        self.third.do(set_busy, place == "a third process", interval)

    def _timed(self, kind: str, number: int) -> float:
        began = time.perf_counter()
        self._pull(kind, number)
        return time.perf_counter() - began

    def _pull(self, kind: str, number: int) -> None:
        cm, dst = self.here.cm, self.here.caches["dst"]
        if kind == "by key":
            cm.pull_cache(CacheKey(1, self._seed * self.pulls + number), self.here.caches["row"])
            tensor_views(dst)[0][number] = tensor_views(self.here.caches["row"])[0][0]
            return
        key = BlocksCacheKey(1, self._seed * self.pulls + (number if kind == "first" else 0))
        cm.pull_blocks(key, dst, [0 if kind == "first" else number], [number])


def _report(bench: Bench, intervals: list[float]) -> None:
    print(f"{bench.nbytes >> 10} KiB over shm, microseconds: median (ninth decile); all bytes verified")
    print(f"{'busy':<17}{'switch interval':<17}" + "".join(f"{kind:>18}" for kind in KINDS))
    for place, interval in itertools.product(PLACES, intervals):
        cells = [sorted(bench.found[kind, place, interval]) for kind in KINDS if (kind, place, interval) in bench.found]
        shown = [f"{statistics.median(times) * 1e6:.0f} ({times[len(times) * 9 // 10] * 1e6:.0f})" for times in cells]
        if shown:
            print(f"{place:<17}{f'{interval * 1e3:g} ms':<17}" + "".join(f"{cell:>18}" for cell in shown))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, default=64)
    parser.add_argument("--pulls", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--intervals-ms", type=float, nargs="+", default=[5, 0.5, 0.05])
    options = parser.parse_args()
    intervals = [each / 1e3 for each in options.intervals_ms]
    with two_ends() as (target, here), closing(ChildEnd("third", fresh=True)) as third:
        bench = Bench(target, third, here, options.pulls, options.kib << 10)
        for name, rows in (("dst", options.pulls), ("row", 1)):
            desc = CacheDesc(1, [rows, bench.nbytes], DataType.DT_UINT8)
            allocate = here.cm.allocate_cache if name == "row" else here.cm.allocate_blocks_cache
            here.caches[name] = allocate(desc)
        # Where no process is busy, or only the third, threads do not wait for each other: one interval is enough.
        turns = [t for t in itertools.product(KINDS, PLACES, intervals) if t[1] in PLACES[1:3] or t[2] == intervals[0]]
        for _, turn in steps(itertools.product(range(options.rounds), turns), lambda step: " ".join(map(str, step[1]))):
            bench.turn(*turn)
        _report(bench, intervals)
    return 0


if __name__ == "__main__":
    # By its own name: functions go to the other processes by theirs.
    sys.exit(importlib.import_module("benchmarks.measure_busy").main())
