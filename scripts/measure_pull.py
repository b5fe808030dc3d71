"""Measure pull_blocks between two processes over shm against a plain memcpy of the same blocks.

    python scripts/measure_pull.py [--mib 512] [--block-kib 64] [--passes 9]

One process publishes, this one pulls random, non-adjacent blocks. Sides are interleaved, pull and memcpy in turn, over
the same number of blocks of the same size, in shared pages; before every pass the source has new bytes and the
destination is poisoned, after it every byte is compared. The memcpy side is NumPy's ``take`` of random rows into a
prepared array, one memcpy a row, without our code, on as many threads as the pull uses. Prints medians and ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)
from llm_datadist.memory.segment import SharedSegment
from llm_datadist.native import usable_cpus
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

#: Blocks at each end for one block moved: every second one is used, so that no two are adjacent.
_SPREAD = 2


def _start(role: LLMRole, cluster_id: int, nbytes: int, listen: str) -> LLMDataDist:
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.sync_kv_timeout = 60_000
    config.mem_pool_cfg = f'{{"memory_size": {nbytes + (1 << 20)}}}'
    if listen:
        config.listen_ip_info = listen
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(config.generate_options())
    return datadist


def _allocate(datadist: LLMDataDist, blocks: int, block_bytes: int, key: BlocksCacheKey | None) -> Cache:
    desc = CacheDesc(1, [blocks * _SPREAD, block_bytes], DataType.DT_UINT8)
    return datadist.cache_manager.allocate_blocks_cache(desc, key)


def _pattern(seed: int, block_bytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, block_bytes, dtype=np.uint8)


def _write(view: NDArray[np.uint8], seed: int) -> None:
    """Give every block its own bytes: a seeded pattern, shifted by the block's number."""
    pattern = _pattern(seed, view.shape[1] + view.shape[0])
    for block, row in enumerate(view):
        row[:] = pattern[block : block + view.shape[1]]


def _publisher(blocks: int, block_bytes: int) -> None:
    """The other process: publish, then write new bytes whenever a seed comes."""
    with_spread = blocks * _SPREAD * block_bytes
    datadist = _start(LLMRole.PROMPT, 0, with_spread, "127.0.0.1:0")
    view = tensor_views(_allocate(datadist, blocks, block_bytes, BlocksCacheKey(0)))[0]
    print(datadist.listen_port, flush=True)
    for line in sys.stdin:
        _write(view, int(line))
        print("written", flush=True)
    datadist.finalize()


class _Puller:
    """This process: a linked decoder, and a memcpy over its own two buffers of the same shape."""

    def __init__(self, blocks: int, block_bytes: int, port: int, order: random.Random) -> None:
        self.datadist = _start(LLMRole.DECODER, 1, blocks * _SPREAD * block_bytes, "")
        info = LLMClusterInfo()
        info.remote_cluster_id = 0
        info.append_local_ip_info("127.0.0.1", 0)
        info.append_remote_ip_info("127.0.0.1", port)
        status, _ = self.datadist.link_clusters([info], 10_000)
        if status is not LLMStatusCode.LLM_SUCCESS:
            raise SystemExit(f"cannot link: {status}")
        self.cache = _allocate(self.datadist, blocks, block_bytes, None)
        self.view: NDArray[np.uint8] = tensor_views(self.cache)[0]
        self.src = [block * _SPREAD for block in order.sample(range(blocks), blocks)]
        self.dst = [block * _SPREAD + 1 for block in order.sample(range(blocks), blocks)]

    def pull(self) -> None:
        self.datadist.cache_manager.pull_blocks(BlocksCacheKey(0), self.cache, self.src, self.dst)


class _Memcpy:
    """The other side of the comparison: the same blocks gathered between two shared segments of this process."""

    def __init__(self, blocks: int, block_bytes: int, src: list[int], threads: int) -> None:
        nbytes = blocks * _SPREAD * block_bytes
        self._segments = [SharedSegment.create(name, nbytes, peers_may_write=True) for name in ("source", "gathered")]
        self.source, spread = (s.view().reshape(-1, block_bytes) for s in self._segments)
        self.gathered = spread[:blocks]
        self._index = np.array(src)
        self._parts = np.array_split(np.arange(blocks), threads)
        self._threads = ThreadPoolExecutor(threads)

    def run(self) -> None:
        list(self._threads.map(self._part, self._parts))

    def _part(self, part: NDArray[np.int64]) -> None:
        out = self.gathered[part[0] : part[-1] + 1]
        np.take(self.source, self._index[part], axis=0, out=out, mode="clip")

    def close(self) -> None:
        self._threads.shutdown()
        for segment in self._segments:
            segment.close()


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _expected(blocks: list[int], block_bytes: int, rows: int, seed: int) -> NDArray[np.uint8]:
    pattern = _pattern(seed, block_bytes + rows)
    return np.lib.stride_tricks.sliding_window_view(pattern, block_bytes)[blocks]


def _pull_pass(puller: _Puller, publisher: subprocess.Popen[str], seed: int) -> float:
    assert publisher.stdin is not None
    assert publisher.stdout is not None
    publisher.stdin.write(f"{seed}\n")
    publisher.stdin.flush()
    publisher.stdout.readline()
    puller.view[:] = 0xA5
    seconds = _timed(puller.pull)
    rows, block_bytes = puller.view.shape
    if not np.array_equal(puller.view[puller.dst], _expected(puller.src, block_bytes, rows, seed)):
        raise SystemExit("wrong bytes inside the pulled blocks")
    if not (puller.view[::_SPREAD] == 0xA5).all():
        raise SystemExit("wrong bytes outside the pulled blocks")
    return seconds


def _memcpy_pass(memcpy: _Memcpy, src: list[int], seed: int) -> float:
    _write(memcpy.source, seed)
    memcpy.gathered[:] = 0xA5
    seconds = _timed(memcpy.run)
    rows, block_bytes = memcpy.source.shape
    if not np.array_equal(memcpy.gathered, _expected(src, block_bytes, rows, seed)):
        raise SystemExit("wrong bytes in the memcpy side")
    return seconds


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--block-kib", type=int, default=64)
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--publisher", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    block_bytes = options.block_kib << 10
    blocks = (options.mib << 20) // block_bytes
    if options.publisher:
        _publisher(blocks, block_bytes)
        return
    command = [sys.executable, __file__, "--publisher", f"--mib={options.mib}", f"--block-kib={options.block_kib}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as publisher:
        assert publisher.stdin is not None
        assert publisher.stdout is not None
        puller = _Puller(blocks, block_bytes, int(publisher.stdout.readline()), random.Random(1))
        threads = usable_cpus()
        memcpy = _Memcpy(blocks, block_bytes, puller.src, threads)
        pulls, copies = [], []
        for seed in range(options.passes):
            pulls.append(_pull_pass(puller, publisher, seed))
            copies.append(_memcpy_pass(memcpy, puller.src, seed))
        report = puller.datadist.explain(0)
        memcpy.close()
        puller.datadist.finalize()
        publisher.stdin.close()
    gigabytes = blocks * block_bytes / 1e9
    pull, copy = (gigabytes / statistics.median(times[1:]) for times in (pulls, copies))
    print(f"{blocks} blocks of {options.block_kib} KiB over {report.transport}, {threads} threads, all bytes verified")
    print(f"  first pull    {gigabytes / pulls[0]:6.2f} GB/s (memcpy's first pass {gigabytes / copies[0]:.2f})")
    print(f"  steady pull   {pull:6.2f} GB/s (median of {options.passes - 1})")
    print(f"  steady memcpy {copy:6.2f} GB/s (median of {options.passes - 1})")
    print(f"  ratio         {pull / copy:6.2f}")


if __name__ == "__main__":
    main()
