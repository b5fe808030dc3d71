"""Measure how much of a layer-wise transfer hides behind the computing of the next layers, over shm.

    python scripts/measure_overlap.py [--layers 32] [--mib 4] [--compute-ms 0] [--passes 5]

This process computes and sends, another one receives. Computing is a spin that holds no GIL (SHA-256 of 64 KiB, again
and again), in the main thread; with --compute-ms 0 it takes as long per layer as a layer's transfer took in a
first look. Three things are timed in turn, with one copy thread: computing alone, the transfer alone (every layer is
ready), and both, where layer k is sent while layer k + 1 is computed. Before every transfer the source has new bytes
and the destination is poisoned, after it every byte is compared. Prints medians, and the ratio of both together to the
longer of the two alone: 1 is a transfer that costs nothing, 2 (of equal parts) one that hides nothing. The last layer
has nothing to hide behind, so (layers + 1) / layers is the best there is.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import statistics
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_SPIN = bytes(1 << 16)


class _Ready(LayerSynchronizer):
    """A layer is ready when somebody says so."""

    def __init__(self, layers: int) -> None:
        self.events = [threading.Event() for _ in range(layers)]

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return self.events[layer_index].wait()


def _start(role: LLMRole, cluster_id: int, nbytes: int, listen: str) -> LLMDataDist:
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.sync_kv_timeout = 60_000
    config.mem_pool_cfg = f'{{"memory_size": {nbytes + (1 << 20)}}}'
    if listen:
        config.listen_ip_info = listen
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(config.generate_options() | {"llm.Transport": "shm", "llm.CopyThreads": "1"})
    return datadist


def _pattern(seed: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def _receiver(pipe: Connection, layers: int, nbytes: int) -> None:
    """The other process: poison, and compare, whenever it is told."""
    datadist = _start(LLMRole.DECODER, 1, 2 * layers * nbytes, "127.0.0.1:0")
    cache = _allocate(datadist, layers, nbytes, BlocksCacheKey(1, 0))
    views = tensor_views(cache)
    pipe.send(datadist.listen_port)
    while (seed := pipe.recv()) is not None:
        if seed < 0:
            for view in views:
                view.fill(0)
            pipe.send(True)
        else:
            pattern = _pattern(seed, nbytes)
            pipe.send(all(np.array_equal(view.reshape(-1), np.roll(pattern, i)) for i, view in enumerate(views)))
    datadist.finalize()


def _allocate(datadist: LLMDataDist, layers: int, nbytes: int, key: BlocksCacheKey | None) -> Cache:
    desc = CacheDesc(2 * layers, [1, nbytes], DataType.DT_UINT8)
    return datadist.cache_manager.allocate_blocks_cache(desc, key)


class _Sender:
    """This process: a linked LLMDataDist, its cache, and the pipe to the receiver."""

    def __init__(self, pipe: Connection, layers: int, nbytes: int) -> None:
        self._pipe, self._layers, self._nbytes = pipe, layers, nbytes
        self._seed = 0
        self.datadist = _start(LLMRole.PROMPT, 0, 2 * layers * nbytes, "")
        info = LLMClusterInfo()
        info.remote_cluster_id = 1
        info.append_local_ip_info("127.0.0.1", 0)
        info.append_remote_ip_info("127.0.0.1", pipe.recv())
        status, _ = self.datadist.link_clusters([info], 10_000)
        if status != LLMStatusCode.LLM_SUCCESS:
            raise SystemExit(f"not linked: {status}")
        self._cache = _allocate(self.datadist, layers, nbytes, None)
        self._views = tensor_views(self._cache)

    def transfer(self, compute_s: float) -> float:
        """Send every layer, each after ``compute_s`` of computing; return the seconds, after comparing every byte."""
        self._seed += 1
        for i, view in enumerate(self._views):
            view.reshape(-1)[:] = np.roll(_pattern(self._seed, self._nbytes), i)
        self._pipe.send(-1)
        self._pipe.recv()
        ready = _Ready(self._layers)
        config = TransferWithCacheKeyConfig(BlocksCacheKey(1, 0), range(self._layers), range(self._layers))
        began = time.perf_counter()
        task = self.datadist.cache_manager.transfer_cache_async(self._cache, ready, [config])
        for event in ready.events:
            spin(compute_s)
            event.set()
        status = task.synchronize(60_000)
        took = time.perf_counter() - began
        self._pipe.send(self._seed)
        if status != LLMStatusCode.LLM_SUCCESS or not self._pipe.recv():
            raise SystemExit(f"wrong bytes, or {status}: {task.errors}")
        return took


def spin(seconds: float) -> None:
    """Keep this core busy for so long, without the GIL."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        hashlib.sha256(_SPIN)


def _alone(layers: int, compute_s: float) -> float:
    began = time.perf_counter()
    for _ in range(layers):
        spin(compute_s)
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--mib", type=float, default=4, help="per tensor; a layer has two")
    parser.add_argument("--compute-ms", type=float, default=0, help="per layer; 0: as long as its transfer")
    parser.add_argument("--passes", type=int, default=5)
    asked = parser.parse_args()
    nbytes = int(asked.mib * (1 << 20))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=_receiver, args=(theirs, asked.layers, nbytes))
    other.start()
    try:
        sender = _Sender(ours, asked.layers, nbytes)
        for _ in range(2):
            sender.transfer(0)  # touches every page
        compute_s = asked.compute_ms / 1e3 or sender.transfer(0) / asked.layers
        rounds = [
            (_alone(asked.layers, compute_s), sender.transfer(0), sender.transfer(compute_s))
            for _ in range(asked.passes)
        ]
        sender.datadist.finalize()
        ours.send(None)
    finally:
        other.join(10)
        other.terminate()
    compute, transfer, both = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(together / max(a, b) for a, b, together in rounds)
    print(f"{asked.layers} layers of 2 x {asked.mib:g} MiB over shm, median of {asked.passes}, every byte compared")
    print(f"compute alone   {compute * 1e3:8.1f} ms")
    print(f"transfer alone  {transfer * 1e3:8.1f} ms  {2 * asked.layers * nbytes / transfer / 1e9:.2f} GB/s")
    print(f"both            {both * 1e3:8.1f} ms")
    print(f"both / longer   {ratio:8.2f}  (best possible {(asked.layers + 1) / asked.layers:.2f} for equal parts)")


if __name__ == "__main__":
    main()
