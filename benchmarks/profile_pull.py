"""Profile one small pull from a blocks cache that was resolved before, call by call, between two processes.

    python -m benchmarks.profile_pull [--transport cma] [--kib 64] [--pulls 2000]

Each part of the pull is called alone in a loop, on the very objects that the pull uses; the best of several loops is
printed, in nanoseconds, because other work of the machine only adds to it. A part that others contain is indented
below them. The sum of parts is not quite the whole: caches are warmer for a part that is called alone.
``sys.setprofile`` counts the calls of one pull, of Python functions and of C. Over shm the source is in a pool, over
cma in registered memory.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.two_ends import two_ends
from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from llm_datadist._deadline import Deadline
from llm_datadist._native import execute, parse_blocks
from llm_datadist._transfer import arguments
from llm_datadist._transfer.calls import BlocksTransfer, _Awaiting
from llm_datadist._transport.connection import Transfer
from llm_datadist._transport.samehost.cma import CmaConnection
from llm_datadist.cache_manager import CacheManager

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.world import World

_ROWS = 64
_LOOPS = 10
_KEY = BlocksCacheKey(1, 0)


def publish(world: World, nbytes: int, transport: str = "shm") -> None:
    """At the other end: make the cache that is pulled from."""
    desc = CacheDesc(1, [_ROWS, nbytes], DataType.DT_UINT8)
    if transport == "shm":
        world.caches["kv"] = world.cm.allocate_blocks_cache(desc, _KEY)
    else:
        world.memory["kv"] = memory = np.zeros((_ROWS, nbytes), np.uint8)
        world.caches["kv"] = world.cm.register_blocks_cache(desc, [memory.ctypes.data], _KEY)


def count_calls(call: Callable[[], object]) -> tuple[int, int]:
    """Return how many Python functions and how many of C one call of ``call`` calls."""
    seen: list[str] = []
    sys.setprofile(lambda frame, event, arg: seen.append(event))
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen.count("call") - 1, seen.count("c_call") - 1


def _best(call: Callable[[], object], pulls: int) -> float:
    """Return the nanoseconds of one call in the best of several loops."""
    times = []
    for _ in range(_LOOPS):
        start = time.perf_counter_ns()
        for _ in range(pulls):
            call()
        times.append((time.perf_counter_ns() - start) / pulls)
    return min(times)


def _within(make: Callable[[], Any]) -> Callable[[], None]:
    def call() -> None:
        with make():
            pass

    return call


def parts_of(world: World, transport: str) -> dict[str, Callable[[], object]]:
    """Return the parts of a pull of block 3 into block 5, by name."""
    cm, cache, dst, src = world.cm, world.caches["kv"], [5], [3]
    cm.pull_blocks(_KEY, cache, src, dst)
    engine, deadline = cm._engine, Deadline(3_600_000)
    link_, name = engine.links.get(1), arguments.remote_name(_KEY, 2)
    remote, local = link_.caches.cached[(name, False)], engine.caches.registry.lookup(cache.cache_id)
    to, of = parse_blocks("dst_blocks", dst), parse_blocks("src_blocks", src)
    layers, ours = arguments.layer_selection(None, None, 2), local.storage.tensors
    ends, far, near = remote.pair, remote.geometry, local.geometry
    plan = ends.block_planner(far, near, layers).plan(to, of)
    pool, guards, native = engine._copy_pool, remote.guard_set, (ours.native, remote.tensors.native)
    connection = remote.tensors.connection
    if connection.capabilities.name != transport:
        raise SystemExit(f"the pull goes over {connection.capabilities.name}, not over {transport}")
    copy = connection._memory.read if isinstance(connection, CmaConnection) else execute

    def move() -> None:
        given = engine, "dst_cache", cache.cache_id, layers, to, of, "dst_blocks"
        BlocksTransfer(*given, what="pull_blocks", name=name).run(deadline)

    check = _Awaiting(engine)

    return {
        "pull_blocks": lambda: cm.pull_blocks(_KEY, cache, src, dst),
        "  arguments": lambda: inspect.unwrap(CacheManager.pull_blocks)(check, _KEY, cache, src, dst),
        "    one list": lambda: parse_blocks("src_blocks", src),
        "    layers": lambda: arguments.layer_selection(None, None, 2),
        "    name of the remote cache": lambda: arguments.remote_name(_KEY, 2),
        "  deadline": lambda: Deadline(1000),
        "  the move": move,
        "    span (meters, log)": _within(lambda: engine.meters.span("profile_pull", "")),
        "    hold the local cache": _within(lambda: engine.caches.using(cache.cache_id, "dst_cache")),
        "    link, as an operation": _within(lambda: engine.links.operation(1)),
        "    plan": lambda: ends.block_planner(far, near, layers).plan(to, of),
        "    read": lambda: connection.move(Transfer(plan, ours, remote.tensors, pool, deadline, False, guards)),
        "      guards and the copy itself": lambda: copy(plan, *native, pool, deadline.expires_ns, None, guards),
    }


def main() -> int:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("shm", "cma"), default="shm")
    parser.add_argument("--kib", type=int, default=64)
    parser.add_argument("--pulls", type=int, default=2000)
    options = parser.parse_args()
    with two_ends("auto") as (target, here):  # takes shm for a pool, cma for other memory
        target.do(publish, options.kib << 10, options.transport)
        cm, mine = here.cm, here.cm.allocate_blocks_cache(CacheDesc(1, [_ROWS, options.kib << 10], DataType.DT_UINT8))
        here.caches["kv"] = mine
        for part, call in parts_of(here, options.transport).items():
            print(f"{part:<32}{_best(call, options.pulls):>8.0f} ns", flush=True)
        counted = count_calls(lambda: cm.pull_blocks(_KEY, mine, [3], [5]))
        print("{} Python calls, {} of C".format(*counted))
    return 0


if __name__ == "__main__":
    # By its own name: functions go to the other process by theirs.
    sys.exit(importlib.import_module("benchmarks.profile_pull").main())
