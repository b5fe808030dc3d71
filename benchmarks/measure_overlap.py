"""Measure how much of a layer-wise transfer hides behind the computing of the next layers, over shm.

    python -m benchmarks.measure_overlap [--layers 32] [--mib 4] [--compute-ms 0] [--passes 5]

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
import importlib
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.two_ends import two_ends
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LayerSynchronizer,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from llm_datadist.tools.bench.progress import steps
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.support.ends import ChildEnd
    from tests.support.world import World

_KEY: Final = BlocksCacheKey(1)
_SPIN: Final = bytes(1 << 16)


class _Ready(LayerSynchronizer):
    """A layer is ready when its event is set."""

    def __init__(self, layers: int) -> None:
        self.events = [threading.Event() for _ in range(layers)]

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return self.events[layer_index].wait()


def make(world: World, layers: int, nbytes: int, key: BlocksCacheKey | None) -> None:
    """Allocate the cache of one end: two tensors a layer."""
    world.caches["kv"] = world.cm.allocate_blocks_cache(CacheDesc(2 * layers, [1, nbytes], DataType.DT_UINT8), key)


def poison(world: World) -> None:
    """At the target: overwrite what is to be written."""
    for view in tensor_views(world.caches["kv"]):
        view.fill(0)


def holds(world: World, seed: int) -> bool:
    """At the target: compare every byte with what was sent."""
    views = tensor_views(world.caches["kv"])
    pattern = _pattern(seed, views[0].nbytes)
    return all(np.array_equal(view.reshape(-1), np.roll(pattern, i)) for i, view in enumerate(views))


def _pattern(seed: int, nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class _Sender:
    """The initiator, which sends its cache layer by layer."""

    def __init__(self, target: ChildEnd, here: World, layers: int) -> None:
        self._target, self._here, self._layers = target, here, layers
        self._seed = 0

    def transfer(self, compute_s: float) -> float:
        """Send every layer, each after ``compute_s`` of computing; return the seconds, after comparing every byte."""
        self._seed += 1
        cache = self._here.caches["kv"]
        for i, view in enumerate(tensor_views(cache)):
            view.reshape(-1)[:] = np.roll(_pattern(self._seed, view.nbytes), i)
        self._target.do(poison)
        ready = _Ready(self._layers)
        config = TransferWithCacheKeyConfig(_KEY, range(self._layers), range(self._layers))
        began = time.perf_counter()
        task = self._here.cm.transfer_cache_async(cache, ready, [config])
        for event in ready.events:
            spin(compute_s)
            event.set()
        status = task.synchronize(60_000)
        took = time.perf_counter() - began
        if status != LLMStatusCode.LLM_SUCCESS or not self._target.do(holds, self._seed):
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


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--mib", type=float, default=4, help="per tensor; a layer has two")
    parser.add_argument("--compute-ms", type=float, default=0, help="per layer; 0: as long as its transfer")
    parser.add_argument("--passes", type=int, default=5)
    asked = parser.parse_args()
    nbytes = int(asked.mib * (1 << 20))
    pool = f'{{"memory_size": {2 * asked.layers * nbytes + (1 << 20)}}}'
    with two_ends(
        extra={"llm.CopyThreads": "1"},
        mem_pool_cfg=pool,
        sync_kv_timeout=60_000,
        enable_remote_cache_accessible=True,
    ) as (target, here):
        target.do(make, asked.layers, nbytes, _KEY)
        make(here, asked.layers, nbytes, None)
        sender = _Sender(target, here, asked.layers)
        for _ in range(2):
            sender.transfer(0)  # touches every page
        compute_s = asked.compute_ms / 1e3 or sender.transfer(0) / asked.layers
        rounds = [
            (_alone(asked.layers, compute_s), sender.transfer(0), sender.transfer(compute_s))
            for _ in steps(range(asked.passes), "pass {}".format, "passes")
        ]
    compute, transfer, both = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(together / max(a, b) for a, b, together in rounds)
    print(f"{asked.layers} layers of 2 x {asked.mib:g} MiB over shm, median of {asked.passes}, every byte compared")
    print(f"compute alone   {compute * 1e3:8.1f} ms")
    print(f"transfer alone  {transfer * 1e3:8.1f} ms  {2 * asked.layers * nbytes / transfer / 1e9:.2f} GB/s")
    print(f"both            {both * 1e3:8.1f} ms")
    print(f"both / longer   {ratio:8.2f}  (best possible {(asked.layers + 1) / asked.layers:.2f} for equal parts)")
    return 0


if __name__ == "__main__":
    # By its own name: functions go to the other process by theirs.
    sys.exit(importlib.import_module("benchmarks.measure_overlap").main())
