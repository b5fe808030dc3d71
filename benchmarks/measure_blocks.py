"""Measure what a block costs when there are 10^2 to 10^6 of them: parsing, planning and copying, beside a plain copy.

    python -m benchmarks.measure_blocks [--block-bytes 4096] [--blocks 100 1000 10000 100000 1000000] [--passes 5]

Random blocks, none of them adjacent, inside this process, on one thread: the lists of Python integers become arrays
("parse"), the arrays a plan ("plan"), the plan moves bytes ("copy"). "memcpy" is NumPy's ``take`` of the same source
blocks into memory that is written in order, one memcpy a block: less work than ours, whose destinations are random too.
So that 10^6 blocks fit, the destination repeats --mib of memory as often as needed, each time at addresses of its own;
the source is as large. Copy and memcpy take turns; before every turn the source has new bytes and the destination is
poisoned, after it every byte is compared. Prints medians in nanoseconds a block, and what all three together cost
beside memcpy.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from llm_datadist._memory.segment import AddressRange
from llm_datadist._native import NO_DEADLINE, Plan, Tensors, execute, parse_blocks, plan_blocks
from llm_datadist.tools.bench.progress import steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llm_datadist._native import BlockList

T = TypeVar("T")

_POISON: Final = 0xA5
_MAP_FIXED: Final = 0x10
#: Blocks at each end for one block moved: every second one is used, so that no two are adjacent.
_SPREAD: Final = 2


@contextmanager
def repeated(nbytes: int, times: int) -> Iterator[int]:
    """Yield the address of ``times`` mappings of the same ``nbytes``, one behind the other."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    base = libc.mmap(None, nbytes * times, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    fd = os.memfd_create("blocks")
    try:
        os.ftruncate(fd, nbytes)
        for number in range(times):
            at = base + number * nbytes
            if libc.mmap(at, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != at:
                raise OSError(ctypes.get_errno(), "mmap")
        yield base
    finally:
        os.close(fd)
        libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(nbytes * times))


class Blocks:
    """So many pairs of blocks, their memory, and what was measured of them."""

    def __init__(self, count: int, block_bytes: int, most_bytes: int, base: int) -> None:
        self.count, self.block_bytes = count, block_bytes
        self._physical = min(_SPREAD * count, most_bytes // block_bytes)  # blocks of memory
        rows = -(-_SPREAD * count // self._physical) * self._physical  # of addresses
        random = np.random.default_rng(count)
        self._dst = random.permutation(rows // _SPREAD)[:count] * _SPREAD + 1
        # A block of memory has one source, whatever the address at which it is written.
        self._origin = random.permutation(self._physical // _SPREAD) * _SPREAD
        self._src = self._origin[self._dst % self._physical // _SPREAD]
        self._lists = self._dst.tolist(), self._src.tolist()
        self._rows = rows
        self._source = np.zeros((self._physical, block_bytes), np.uint8)
        memory = AddressRange(base, self._physical * block_bytes, writable=True)
        self._memory = memory.array().reshape(self._physical, block_bytes)
        self._tensors = (
            Tensors(np.array([base], np.uint64), rows * block_bytes).native,
            Tensors(np.array([self._source.ctypes.data], np.uint64), self._source.nbytes).native,
        )
        self._gathered = np.zeros((min(count, self._physical // _SPREAD), block_bytes), np.uint8)

    def measure(self, seed: int) -> tuple[float, float, float, float]:
        """Return the seconds of one turn: parse, plan, copy, memcpy."""
        self._source[:] = np.random.default_rng(seed).integers(0, 256, self.block_bytes, dtype=np.uint8)
        self._source.view(np.uint64)[:] += np.arange(self._physical, dtype=np.uint64)[:, None]  # every block its own
        self._memory[:] = _POISON
        arrays, parse = _timed(lambda: tuple(parse_blocks("blocks", each) for each in self._lists))
        plan, planning = _timed(lambda: self._plan(*arrays))
        _, copy = _timed(lambda: execute(plan, *self._tensors, None, NO_DEADLINE))
        self._verify()
        return parse, planning, copy, self._memcpy()

    def _plan(self, dst: BlockList, src: BlockList) -> Plan:
        return plan_blocks(
            dst, src, block_bytes=self.block_bytes, dst_count=self._rows, src_count=self._physical, alias=False
        )

    def _memcpy(self) -> float:
        """Copy the same source blocks into memory in order, again and again."""
        step, seconds = len(self._gathered), 0.0
        for at in range(0, self.count, step):
            part = self._src[at : at + step]
            out = self._gathered[: len(part)]
            out[:] = _POISON
            seconds += _timed(lambda: np.take(self._source, part, axis=0, out=out, mode="clip"))[1]  # noqa: B023
            if not np.array_equal(out, self._source[part]):
                raise SystemExit("wrong bytes in the memcpy side")
        return seconds

    def _verify(self) -> None:
        written = np.unique(self._dst % self._physical)
        if not np.array_equal(self._memory[written], self._source[self._origin[written // _SPREAD]]):
            raise SystemExit("wrong bytes inside the addressed blocks")
        if not (self._memory[::_SPREAD] == _POISON).all():
            raise SystemExit("wrong bytes outside the addressed blocks")


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-bytes", type=int, default=4096)
    parser.add_argument("--blocks", type=int, nargs="+", default=[100, 1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    nbytes = options.mib << 20
    times = -(-_SPREAD * max(options.blocks) * options.block_bytes // nbytes)
    print(f"blocks of {options.block_bytes} bytes, one thread, nanoseconds a block, all bytes verified")
    print(f"{'blocks':>9}{'parse':>9}{'plan':>9}{'copy':>9}{'memcpy':>9}{'all / memcpy':>14}")
    for count in steps(options.blocks, "{} blocks".format):
        with repeated(min(nbytes, _SPREAD * count * options.block_bytes), times) as base:
            passes = max(options.passes, min(100, 10_000 // count))
            blocks = Blocks(count, options.block_bytes, nbytes, base)
            blocks.measure(0)  # touches the pages
            turns = zip(*(blocks.measure(seed + 1) for seed in range(passes)), strict=True)
            parse, plan, copy, plain = (statistics.median(each) / count * 1e9 for each in turns)
            del blocks
        ratio = (parse + plan + copy) / plain
        print(f"{count:>9}{parse:>9.1f}{plan:>9.1f}{copy:>9.0f}{plain:>9.0f}{ratio:>14.2f}", flush=True)


if __name__ == "__main__":
    main()
