"""Measure what authentication and encryption cost: links with credentials beside links without.

    python -m benchmarks.measure_sealed [--passes 15] [--mib 256]

A plain and a sealed link, each between a process of its own and this one, take turns. Linking, one block of 4 KiB over
shm and over tcp, and blocks of 64 KiB over tcp: speed, and CPU seconds per GiB of both ends together. Before every
pull the destination is poisoned, after it every byte is compared. Prints the medians of the differences between turns
that followed each other, and their middle half.
"""

from __future__ import annotations

import argparse
import importlib
import resource
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.two_ends import two_ends
from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from llm_datadist._links.credentials import new_secret
from llm_datadist.tools.bench.progress import steps
from llm_datadist.views import tensor_views
from tests.support.linking import SUCCESS, info, link, unlink

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.ends import ChildEnd
    from tests.support.world import World

_KEY: Final = BlocksCacheKey(1, 0)
_SMALL, _LARGE = 4 << 10, 64 << 10
_SMALL_PULLS: Final = 300
_POISON: Final = 0xA5


def publish(world: World, blocks: int, block_bytes: int) -> bytes:
    """At the other end: allocate and fill blocks; return their bytes."""
    cache = world.cm.allocate_blocks_cache(CacheDesc(1, [blocks, block_bytes], DataType.DT_UINT8), _KEY)
    (view,) = tensor_views(cache)
    view[:] = np.random.default_rng(blocks).integers(0, 256, view.shape, dtype=np.uint8)
    world.memory["cache"] = cache
    return view.tobytes()


def cpu_seconds(_: World | None = None) -> float:
    """Return what this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Side:
    """One link, and blocks to pull over it."""

    def __init__(self, undo: ExitStack, transport: str, extra: dict[str, str], blocks: int, block_bytes: int) -> None:
        pool = f'{{"memory_size": {blocks * block_bytes + (1 << 20)}}}'
        ends = two_ends(transport, extra=extra, mem_pool_cfg=pool, host_mem_pool_cfg="", sync_kv_timeout=120_000)
        self._target: ChildEnd
        self._target, self._here = undo.enter_context(ends)
        self._bytes = self._target.do(publish, blocks, block_bytes)
        cache = self._here.cm.allocate_blocks_cache(CacheDesc(1, [blocks, block_bytes], DataType.DT_UINT8))
        (self._view,) = tensor_views(cache)
        self._cache, self._order = cache, np.random.default_rng(1).permutation(blocks).tolist()

    def _check(self, pulled: int) -> None:
        if self._view[:pulled].tobytes() != self._bytes[: self._view[:pulled].nbytes]:
            raise SystemExit("the bytes that were pulled are wrong")

    def small(self) -> float:
        """Return the microseconds of one block, the median of some hundred."""
        taken = []
        for _ in range(_SMALL_PULLS):
            self._view[0] = _POISON
            began = time.perf_counter()
            self._here.cm.pull_blocks(_KEY, self._cache, [0], [0])
            taken.append(1e6 * (time.perf_counter() - began))
            self._check(1)
        return statistics.median(taken)

    def large(self) -> tuple[float, float]:
        """Return GB/s and CPU seconds per GiB of all blocks."""
        self._view[:] = _POISON
        used, began = self._used(), time.perf_counter()
        self._here.cm.pull_blocks(_KEY, self._cache, self._order, self._order)
        seconds, used = time.perf_counter() - began, self._used() - used
        self._check(len(self._order))
        return self._view.nbytes / seconds / 1e9, used / (self._view.nbytes / 2**30)

    def _used(self) -> float:
        return cpu_seconds() + self._target.do(cpu_seconds)

    def linking(self) -> float:
        """Return the milliseconds of a link."""
        there = [info(1, self._target.port)]
        if (codes := unlink(self._here, there)) != SUCCESS:
            raise SystemExit(f"cannot unlink: {codes}")
        began = time.perf_counter()
        if (codes := link(self._here, there)) != SUCCESS:
            raise SystemExit(f"cannot link: {codes}")
        return 1e3 * (time.perf_counter() - began)


def compare(what: str, unit: str, passes: int, turns: list[Callable[[], float]], *, share: bool = False) -> None:
    """Print what the second costs more than the first, or its share of the first."""
    rounds = steps(range(passes + 1), f"{what}, pass {{}}".format, "passes")
    found = [tuple(turn() for turn in turns) for _ in rounds][1:]
    pairs = sorted(sealed / plain if share else sealed - plain for plain, sealed in found)
    plain, sealed = (statistics.median(column) for column in zip(*found, strict=True))
    low, high = pairs[len(pairs) // 4], pairs[-len(pairs) // 4 - 1]
    sign = "x" if share else "+"
    print(
        f"{what:28} {plain:8.2f} {sealed:8.2f} {unit:6} {sign}{statistics.median(pairs):7.2f} [{low:.2f}, {high:.2f}]"
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument("--mib", type=int, default=256, help="MiB of the large pull")
    options = parser.parse_args(arguments)
    passes = options.passes
    print(f"{'':28} {'plain':>8} {'sealed':>8}")
    with tempfile.TemporaryDirectory() as folder:
        ways: tuple[dict[str, str], ...] = {}, {"llm.AuthSecretFile": str(new_secret(Path(folder) / "secrets", "a"))}
        for transport in ("shm", "tcp"):
            with ExitStack() as undo:
                sides = [Side(undo, transport, way, 16, _SMALL) for way in ways]
                compare(f"link, {transport}", "ms", passes, [each.linking for each in sides])
                compare(f"one block of 4 KiB, {transport}", "us", passes, [each.small for each in sides])
        with ExitStack() as undo:
            sides = [Side(undo, "tcp", way, (options.mib << 20) // _LARGE, _LARGE) for way in ways]
            compare("64 KiB blocks, tcp", "GB/s", passes, [lambda s=s: s.large()[0] for s in sides], share=True)  # type: ignore[misc]
            compare("64 KiB blocks, tcp, CPU", "s/GiB", passes, [lambda s=s: s.large()[1] for s in sides])  # type: ignore[misc]
    return 0


if __name__ == "__main__":
    sys.exit(importlib.import_module("benchmarks.measure_sealed").main())
