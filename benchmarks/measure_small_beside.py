"""Measure what a small pull over tcp waits for while a large one runs on the same link.

    python -m benchmarks.measure_small_beside [--mib 256] [--block-kib 64] [--passes 5]

The two ends are those of ``llm-datadist bench --transport tcp``, over loopback. In each pass one block is pulled alone,
then again and again while another thread pulls all the others, random and non-adjacent. Before every pass the source
has new bytes and the destination is poisoned, after it every byte is compared. Prints the medians: the small pull
alone, beside the large one, the worst beside it, and what the large one took.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING

from llm_datadist.tools.bench.contenders.base import Facts, Role
from llm_datadist.tools.bench.contenders.ours import KEY, Ours
from llm_datadist.tools.bench.progress import steps
from llm_datadist.tools.bench.workload import BenchWorkload, Op
from tests.support.ends import ChildEnd

if TYPE_CHECKING:
    from tests.support.world import World

_ALONE = 100


def start_source(world: World, workload: BenchWorkload) -> Facts:
    """At the other end: publish."""
    world.memory["contender"] = contender = Ours.over("tcp")(Role.SOURCE, workload)
    return contender.start()


def fill_source(world: World, seed: int) -> None:
    """At the other end: write new bytes."""
    world.memory["contender"].fill(seed)


def stop_source(world: World) -> None:
    """At the other end: finalize."""
    world.memory.pop("contender").stop()


class Puller(Ours):
    """The destination: pulls the first block of the workload, or all the others."""

    transport = "tcp"

    def start(self) -> Facts:
        """As every destination."""
        self._src, self._dst = self.workload.src_blocks.tolist(), self.workload.dst_blocks.tolist()
        return super().start()

    def pull(self, begin: int, end: int | None) -> float:
        """Pull some of the blocks; return the seconds it took."""
        started = time.perf_counter()
        self._datadist.cache_manager.pull_blocks(KEY, self._cache, self._src[begin:end], self._dst[begin:end])
        return time.perf_counter() - started

    def beside(self) -> tuple[float, list[float]]:
        """Pull one block again and again while another thread pulls the others.

        Returns the seconds of the large pull, and of each small one.
        """
        took: list[float] = []
        thread = threading.Thread(target=lambda: took.append(self.pull(1, None)))
        thread.start()
        small = []
        while thread.is_alive():
            small.append(self.pull(0, 1))
        thread.join()
        return took[0], small or [self.pull(0, 1)]


def _measure(source: ChildEnd, puller: Puller, passes: int) -> list[tuple[float, float, float, float]]:
    rows = []
    for seed in steps(range(passes + 1), "pass {}".format, "passes"):
        source.do(fill_source, seed)
        puller.poison()
        alone = statistics.median(puller.pull(0, 1) for _ in range(_ALONE))
        large, small = puller.beside()
        puller.verify(seed)
        rows.append((alone, statistics.median(small), max(small), large))
    return rows[1:]  # the first pass touches every page


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="MiB of the large pull")
    parser.add_argument("--block-kib", type=int, default=64, help="KiB of a block, and of the small pull")
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    blocks = (options.mib << 10) // max(1, options.block_kib)
    if options.passes < 1 or options.block_kib < 1 or blocks < 2:
        parser.error("--passes must be at least 1, --block-kib too, and --mib more than one block")
    workload = BenchWorkload(op=Op.PULL, block_bytes=options.block_kib << 10, blocks=blocks)
    source, puller = ChildEnd("source", fresh=True), Puller(Role.DESTINATION, workload)
    try:
        facts = source.do(start_source, workload)
        puller.start()
        puller.connect(facts)
        rows = _measure(source, puller, options.passes)
        puller.stop()
        source.do(stop_source)
    finally:
        source.close()
    names = ("small, alone", "small, beside", "the worst beside", "the large one")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        low, middle, high = (1e3 * each for each in (min(column), statistics.median(column), max(column)))
        print(f"{name:18} {middle:9.2f} ms   ({low:.2f} to {high:.2f})")
    return 0


if __name__ == "__main__":
    # By its own name: functions go to the other process by theirs.
    sys.exit(importlib.import_module("benchmarks.measure_small_beside").main())
