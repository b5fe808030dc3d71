"""Measure what a small pull over tcp waits for while a large one runs on the same link.

    python scripts/measure_small_beside.py [--mib 256] [--block-kib 64] [--passes 5]

Two processes over loopback. In each pass one block is pulled alone, then again and again while another thread pulls all
the others, random and non-adjacent. Before every pass the source has new bytes and the destination is poisoned, after
it every byte is compared. Prints the medians: the small pull alone, beside the large one, the worst beside it, and what
the large one took.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import threading
import time
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
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KEY = BlocksCacheKey(0)
_POISON = 0xA5


def _start(role: LLMRole, cluster_id: int, nbytes: int, listen: str = "") -> LLMDataDist:
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.sync_kv_timeout = 60_000
    config.mem_pool_cfg = f'{{"memory_size": {nbytes + (1 << 20)}}}'
    if listen:
        config.listen_ip_info = listen
    datadist = LLMDataDist(role, cluster_id)
    datadist.init({**config.generate_options(), "llm.Transport": "tcp"})
    return datadist


def _allocate(datadist: LLMDataDist, blocks: int, block_bytes: int, key: BlocksCacheKey | None) -> Cache:
    desc = CacheDesc(1, [2 * blocks, block_bytes], DataType.DT_UINT8)
    return datadist.cache_manager.allocate_blocks_cache(desc, key)


def _block(seed: int, number: int, block_bytes: int) -> NDArray[np.uint8]:
    """Return the bytes of a block: every one has its own, other ones with every seed."""
    words = np.arange(block_bytes // 8, dtype=np.uint64)
    return (words * np.uint64(2 * seed + 1) + np.uint64((number << 24) + seed)).view(np.uint8)


def _publisher(blocks: int, block_bytes: int) -> None:
    """The other process: publish, then write new bytes whenever a seed comes."""
    datadist = _start(LLMRole.PROMPT, 0, 2 * blocks * block_bytes, "127.0.0.1:0")
    view = tensor_views(_allocate(datadist, blocks, block_bytes, _KEY))[0]
    print(datadist.listen_port, flush=True)
    for line in sys.stdin:
        for number, block in enumerate(view):
            block[:] = _block(int(line), number, block_bytes)
        print("written", flush=True)
    datadist.finalize()


class _Puller:
    """This process: pulls, and compares what has come."""

    def __init__(self, blocks: int, block_bytes: int, port: int) -> None:
        self.datadist = _start(LLMRole.DECODER, 1, 2 * blocks * block_bytes)
        info = LLMClusterInfo()
        info.remote_cluster_id = 0
        info.append_local_ip_info("127.0.0.1", 0)
        info.append_remote_ip_info("127.0.0.1", port)
        status, _ = self.datadist.link_clusters([info], 10_000)
        if status is not LLMStatusCode.LLM_SUCCESS:
            raise SystemExit(f"cannot link: {status}")
        self.cache = _allocate(self.datadist, blocks, block_bytes, None)
        self.view: NDArray[np.uint8] = tensor_views(self.cache)[0]
        order = random.Random(1)
        self.src = [2 * block for block in order.sample(range(blocks), blocks)]
        self.dst = [2 * block + 1 for block in order.sample(range(blocks), blocks)]

    def pull(self, begin: int, end: int) -> float:
        """Pull the chosen blocks; return the seconds it took."""
        started = time.perf_counter()
        self.datadist.cache_manager.pull_blocks(_KEY, self.cache, self.src[begin:end], self.dst[begin:end])
        return time.perf_counter() - started

    def beside(self) -> tuple[float, list[float]]:
        """Pull one block while another thread pulls the others; return the seconds of that, and of each of ours."""
        took: list[float] = []
        thread = threading.Thread(target=lambda: took.append(self.pull(1, len(self.src))))
        thread.start()
        small = []
        while thread.is_alive():
            small.append(self.pull(0, 1))
        thread.join()
        return took[0], small or [self.pull(0, 1)]

    def verify(self, seed: int) -> None:
        """Compare every byte, also those that nobody asked for."""
        wanted = dict(zip(self.dst, self.src, strict=True))
        for number, block in enumerate(self.view):
            source = wanted.get(number)
            good = (block == _POISON).all() if source is None else (block == _block(seed, source, block.size)).all()
            if not good:
                raise SystemExit(f"block {number} is wrong")


def _measure(child: subprocess.Popen[str], puller: _Puller, passes: int) -> list[tuple[float, float, float, float]]:
    assert child.stdin is not None
    assert child.stdout is not None
    rows = []
    for seed in range(passes + 1):
        print(seed, file=child.stdin, flush=True)
        child.stdout.readline()
        puller.view[:] = _POISON
        alone = statistics.median(puller.pull(0, 1) for _ in range(100))
        large, small = puller.beside()
        puller.verify(seed)
        rows.append((alone, statistics.median(small), max(small), large))
    return rows[1:]  # the first pass touches every page


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--mib", type=int, default=256, help="MiB of the large pull")
    parser.add_argument("--block-kib", type=int, default=64, help="KiB of a block, and of the small pull")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--publish", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    block_bytes = arguments.block_kib << 10
    blocks = (arguments.mib << 20) // block_bytes
    if arguments.passes < 1 or block_bytes < 8 or blocks < 2:
        parser.error("--passes must be at least 1, --block-kib too, and --mib more than one block")
    if arguments.publish:
        _publisher(blocks, block_bytes)
        return
    command = [sys.executable, __file__, "--publish", "--mib", str(arguments.mib)]
    command += ["--block-kib", str(arguments.block_kib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        puller = _Puller(blocks, block_bytes, int(child.stdout.readline()))
        rows = _measure(child, puller, arguments.passes)
        puller.datadist.finalize()
    names = ("small, alone", "small, beside", "the worst beside", "the large one")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        low, middle, high = (1e3 * each for each in (min(column), statistics.median(column), max(column)))
        print(f"{name:18} {middle:9.2f} ms   ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
