"""Unmapping a large pool on the control thread: for how long does it not answer?

    python -m faults unmapping --gib 4

An end has a mapping of so much memory, every page of it touched, and drops the last reference to it on its control
thread. A linked peer asks it where a row is, again and again; printed is its longest wait, without and with that.
"""

import argparse
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from faults.crowd import REALTIME, measured_ends
from faults.harness import timed
from llm_datadist import CacheKeyByIdAndIndex
from llm_datadist._memory.host import available_memory
from llm_datadist._memory.segment import SharedSegment
from tests.support.linking import SUCCESS, info, link
from tests.support.moves import Spec, Use, call, make
from tests.support.world import World

BOUND_MS: Final = 5.0


def hold(world: World, nbytes: int) -> None:
    world.memory["large"] = [SharedSegment.create("large", nbytes, peers_may_write=True, prefault=True)]


def drop(world: World) -> float:
    """Drop the last reference on the control thread; return for how long that held it up, in milliseconds."""
    held: list[Any] = world.memory.pop("large")
    return world.probe.on_control(lambda: timed(held.pop().close))


def ask(world: World, cache_id: int, seconds: float) -> float:
    """Pull a row, for which the owner is asked, again and again; return the longest wait in milliseconds."""
    longest, until = 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        longest = max(longest, timed(call, world, "pull_cache", CacheKeyByIdAndIndex(1, cache_id, 0), Use("row"), 0))
    return longest


def row(world: World) -> int:
    make(world, "row", Spec(rows=1), 1)
    return world.caches["row"].cache_id


def drop_here(world: World) -> None:
    """Drop the memory on a thread that may wait."""
    dropped = threading.Thread(target=world.memory.pop("large")[0].close)
    dropped.start()
    dropped.join()


def measure(options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    nbytes = min(int(options.gib * 2**30), available_memory()[0] // 2)
    with measured_ends("shm", realtime=options.realtime) as (prompt, decoder):
        cache_id = prompt.do(row)
        decoder.do(row)
        assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
        decoder.do(ask, cache_id, 0.5)
        for _ in range(options.rounds):
            prompt.do(hold, nbytes)
            quiet = decoder.do(ask, cache_id, 1.5)
            decoder.begin(ask, cache_id, 1.5)
            time.sleep(0.3)
            held_up = prompt.do(drop)
            beside = decoder.finish()
            prompt.do(hold, nbytes)
            here = timed(prompt.do, drop_here)
            text = f"the control thread was held up for {held_up:.3f} ms (another thread needs {here:.0f} ms)"
            text += f"; longest wait of the peer {quiet:.2f} ms before, {beside:.2f} ms meanwhile"
            yield f"{nbytes / 2**30:.2f} GiB: {text}", held_up <= BOUND_MS


OPTIONS: Final = {"gib": (4.0, ""), "rounds": (3, ""), "realtime": (False, REALTIME)}
