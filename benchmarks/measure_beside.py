"""Measure what a large pull leaves to the Python beside it: a counting thread's speed, and private memory.

    python -m benchmarks.measure_beside [--gib 4] [--mib 512] [--block-kib 64] [--transport shm] [--copy-threads 1]

One process owns a blocks cache, this one pulls all its blocks, shuffled, in calls of --mib until --gib have moved.
Meanwhile a thread here counts in pure Python. Pulls take turns with pauses as long as the pull before, in which the
thread counts alone; its speeds beside the pulls and alone are compared, once by the clock and once without the time in
which it was ready and other processes had the CPUs (``/proc/self/task/.../schedstat``): where the two differ much, the
machine was busy, and the second says what the pull alone costs. The first call is one more, apart: it maps the owner's
pages. RssAnon of both processes is looked at every 10 ms while pulls run, the first one included; all memory
of the two ends was touched before. Before every pull the source has new bytes and the destination is poisoned, after
it every byte is compared. Prints both figures with the floors of the project, and ends with 1 below one of them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.two_ends import two_ends
from llm_datadist import BlocksCacheKey, Cache, CacheDesc, DataType
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.support.ends import ChildEnd
    from tests.support.world import World

MIB: Final = 1 << 20
KEY: Final = BlocksCacheKey(1)
SPEED_FLOOR: Final = 0.8
GROWTH_FLOOR_MIB: Final = 64
#: Blocks at each end that no pull addresses.
_UNUSED: Final = 16
_POISON: Final = 0xA5


@dataclass(frozen=True)
class Size:
    """One call: so many blocks of so many bytes."""

    blocks: int
    block_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of one call."""
        return self.blocks * self.block_bytes

    @property
    def pool(self) -> str:
        """Configuration of a pool that holds them and the unused ones."""
        return f'{{"memory_size": {(self.blocks + _UNUSED) * self.block_bytes + MIB}}}'


def make(world: World, size: Size, key: BlocksCacheKey | None) -> None:
    """Allocate the cache of one end and touch its memory."""
    desc = CacheDesc(1, [size.blocks + _UNUSED, size.block_bytes], DataType.DT_UINT8)
    world.caches["kv"] = cache = world.cm.allocate_blocks_cache(desc, key)
    _rows(cache)[:] = _POISON


def write(world: World, seed: int) -> None:
    """Give every block its own bytes."""
    rows = _rows(world.caches["kv"])
    pattern = _pattern(seed, rows)
    for block, row in enumerate(rows):
        row[:] = pattern[block : block + row.size]


def watch(world: World, pids: list[int]) -> None:
    """Look at the private memory of these processes from now on, in a thread."""
    world.memory["watcher"] = _Watcher(pids)
    world.memory["watcher"].start()


def watched(world: World) -> list[int]:
    """Stop looking; return by how many bytes each process grew at most."""
    return world.memory.pop("watcher").end()  # type: ignore[no-any-return]


def _rows(cache: Cache) -> NDArray[np.uint8]:
    return tensor_views(cache)[0]


def _pattern(seed: int, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, sum(rows.shape), dtype=np.uint8)


def _rss_anon(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


class _Watcher(threading.Thread):
    def __init__(self, pids: list[int]) -> None:
        super().__init__(name="watcher")
        self._pids, self._over = pids, threading.Event()
        self._before = self._most = [_rss_anon(pid) for pid in pids]

    def run(self) -> None:
        while not self._over.wait(0.01):
            self._look()

    def _look(self) -> None:
        self._most = [max(most, _rss_anon(pid)) for most, pid in zip(self._most, self._pids, strict=True)]

    def end(self) -> list[int]:
        self._over.set()
        self.join()
        self._look()
        return [most - before for most, before in zip(self._most, self._before, strict=True)]


@dataclass(frozen=True)
class Speed:
    """Counts per second of the clock, and per second without waiting for a CPU."""

    clock: float
    own: float


class _Counter(threading.Thread):
    """Counts in pure Python until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(name="counter")
        self.count, self.stopped = 0, False

    def look(self) -> tuple[int, float, float]:
        """Return the count, the time, and the seconds spent waiting for a CPU."""
        schedstat = Path(f"/proc/self/task/{self.native_id}/schedstat").read_text().split()
        return self.count, time.perf_counter(), int(schedstat[1]) / 1e9

    def speed_since(self, look: tuple[int, float, float]) -> Speed:
        """Return the speed since an earlier look."""
        count, seconds, kept = (now - then for now, then in zip(self.look(), look, strict=True))
        return Speed(count / seconds, count / (seconds - kept))

    def run(self) -> None:
        while not self.stopped:
            self.count += 1


@dataclass
class Beside:
    """The two processes, and what was measured."""

    owner: ChildEnd
    here: World
    size: Size
    seconds: list[float] = field(default_factory=list)
    speeds: list[tuple[Speed, Speed]] = field(default_factory=list)  # alone, beside a pull
    growth: list[int] = field(default_factory=lambda: [0, 0])  # bytes: here, at the owner

    def run(self, calls: int) -> None:
        """Pull once, then again and again in turn with pauses."""
        self._order = np.random.default_rng(1)
        counter = _Counter()
        counter.start()
        try:
            self._pull(0, counter)
            for seed in range(1, calls + 1):
                look = counter.look()
                time.sleep(self.seconds[-1])
                alone = counter.speed_since(look)
                self.speeds.append((alone, self._pull(seed, counter)))
        finally:
            counter.stopped = True
            counter.join()

    def _pull(self, seed: int, counter: _Counter) -> Speed:
        """Pull everything and compare; return how fast the thread counted meanwhile."""
        rows = _rows(self.here.caches["kv"])
        src, dst = (self._order.permutation(self.size.blocks + _UNUSED)[: self.size.blocks] for _ in range(2))
        numbers = src.tolist(), dst.tolist()
        self.owner.do(write, seed)
        rows[:] = _POISON
        self.owner.do(watch, [os.getpid(), self.owner.pid])
        look = counter.look()
        self.here.cm.pull_blocks(KEY, self.here.caches["kv"], *numbers)
        speed = counter.speed_since(look)
        self.seconds.append(time.perf_counter() - look[1])
        self.growth = [max(pair) for pair in zip(self.growth, self.owner.do(watched), strict=True)]
        _verify(rows, src, dst, _pattern(seed, rows))
        return speed


def _verify(
    rows: NDArray[np.uint8], src: NDArray[np.int64], dst: NDArray[np.int64], pattern: NDArray[np.uint8]
) -> None:
    width, untouched = rows.shape[1], set(range(len(rows))) - set(dst.tolist())
    for from_block, to_block in zip(src.tolist(), dst.tolist(), strict=True):
        if not np.array_equal(rows[to_block], pattern[from_block : from_block + width]):
            raise SystemExit(f"wrong bytes in block {to_block}")
    if not all((rows[block] == _POISON).all() for block in untouched):
        raise SystemExit("wrong bytes outside the pulled blocks")


def _report(measured: Beside, transport: str, copy_threads: int) -> bool:
    by_clock = sorted(beside.clock / alone.clock for alone, beside in measured.speeds)
    ratio = statistics.median(by_clock)
    own = statistics.median(beside.own / alone.own for alone, beside in measured.speeds)
    here, owner = (grown / MIB for grown in measured.growth)
    fast, lean = ratio >= SPEED_FLOOR, max(here, owner) <= GROWTH_FLOOR_MIB
    size, steady = measured.size, measured.seconds[1:]
    print(
        f"{len(steady)} pulls of {size.nbytes >> 20} MiB in blocks of {size.block_bytes >> 10} KiB over {transport}, "
        f"copy threads: {copy_threads}, {size.nbytes / statistics.median(steady) / 1e9:.1f} GB/s beside the counting "
        "thread, all bytes verified"
    )
    print(
        f"  the counting thread keeps {ratio:.2f} of its speed ({by_clock[0]:.2f} to {by_clock[-1]:.2f}), "
        f"floor {SPEED_FLOOR}: {'met' if fast else 'MISSED'}; {own:.2f} without waiting for CPUs that others had"
    )
    print(
        f"  RssAnon grows by {here:.1f} MiB here and {owner:.1f} MiB at the owner, "
        f"at most {GROWTH_FLOOR_MIB} MiB allowed: {'met' if lean else 'MISSED'}"
    )
    return fast and lean


def main() -> int:
    """Measure, print, return 0 when both floors are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--block-kib", type=int, default=64)
    parser.add_argument("--transport", choices=["shm", "cma", "tcp"], default="shm")
    parser.add_argument("--copy-threads", type=int, default=1)
    options = parser.parse_args()
    size = Size((options.mib << 20) // (options.block_kib << 10), options.block_kib << 10)
    extra = {"llm.CopyThreads": str(options.copy_threads)}
    with two_ends(options.transport, extra=extra, mem_pool_cfg=size.pool, sync_kv_timeout=60_000) as (owner, here):
        owner.do(make, size, KEY)
        make(here, size, None)
        measured = Beside(owner, here, size)
        measured.run((options.gib << 30) // size.nbytes)
        return 0 if _report(measured, here.dd.explain(1).transport, options.copy_threads) else 1


if __name__ == "__main__":
    # By its own name: functions go to the other process by theirs.
    sys.exit(importlib.import_module("benchmarks.measure_beside").main())
