"""Strangers at a listener: 2,000 connections that greet, or say nothing, beside a peer that pulls."""

import asyncio
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Self

import numpy as np

from faults.harness import timed
from faults.strangers import hello_of
from llm_datadist import BlocksCacheKey, CacheKeyByIdAndIndex
from llm_datadist._links import messages as wire
from llm_datadist.views import tensor_views
from tests.support.moves import Spec, make, moved, same_bytes, show
from tests.support.world import World, anonymous_bytes

#: What a stranger does once it is connected: says a Hello and stays, says it and goes, says it in two halves of which
#: the second never comes, or says nothing.
MANNERS: Final = ("stays", "goes", "stops", "silent")
CROWD: Final = 2_000
BLOCKS_KEY: Final = BlocksCacheKey(1, 0)
#: Strangers on their way at a time: the queue of a listener is not longer, and a second passes before one comes again.
_COMING: Final = 100


def greeting(cluster_id: int) -> bytes:
    """Return the preamble and a Hello without fault, of a process that was never met before."""
    who = cluster_id, secrets.token_bytes(16), bytes(16)
    hello = hello_of(*who, remote_accessible=True, nonce=secrets.token_bytes(16))
    return wire.CONTROL_PREAMBLE + wire.frame(hello)


class Crowd:
    """Connections of strangers to one port; ``counts`` says how many came. A context manager: closes what is open."""

    def __init__(self, port: int, manners: Sequence[str]) -> None:
        self._address, self._manners = ("127.0.0.1", port), manners
        self._loop = asyncio.new_event_loop()
        self._here: set[asyncio.Task[None]] = set()
        self._made = self._coming = 0  # the second has not said anything yet
        self.counts: Counter[str] = Counter()

    def dial(self) -> None:
        task = self._loop.create_task(self._come(self._manners[self._made % len(self._manners)], 1_000 + self._made))
        self._here.add(task)
        task.add_done_callback(self._here.discard)
        self._made += 1
        self._coming += 1

    async def _come(self, manner: str, number: int) -> None:
        with socket.socket() as sock, suppress(OSError):
            sock.setblocking(False)
            data = b"" if manner == "silent" else greeting(number)
            try:
                await self._loop.sock_connect(sock, self._address)
                await self._loop.sock_sendall(sock, data[: len(data) // 2] if manner == "stops" else data)
                self.counts["said"] += 1
            finally:
                self._coming -= 1
            while manner != "goes" and await self._loop.sock_recv(sock, 65536):
                self.counts["welcomed"] += 1

    def serve(self, seconds: float) -> None:
        """Let each stranger do what it does."""
        self._loop.run_until_complete(asyncio.sleep(seconds))

    def come(self, count: int) -> None:
        """Have so many strangers come, one after the other, and say what they say."""
        for _ in range(count):
            self.dial()
            self.serve(0)
            while self._coming > _COMING:
                self.serve(0.01)
        while self._coming:
            self.serve(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        async def leave() -> None:
            left = list(self._here)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self._loop.run_until_complete(leave())
        self._loop.close()


def prepare(world: World) -> Any:
    """Make, at the owner, the caches that are pulled; return their bytes and the key of the row."""
    blocks = make(world, "blocks", Spec(rows=8, stride=4096, blocks=True, blocks_key=BLOCKS_KEY), 1)
    row = make(world, "key", Spec(rows=1, stride=4096), 2)
    return blocks, row, CacheKeyByIdAndIndex(1, world.caches["key"].cache_id, 0)


def pull(world: World, kind: str, sources: Any, seconds: float) -> list[float]:
    """Pull for some seconds, by blocks or by key; return how long each pull took (ms). Every byte is compared."""
    blocks, row, key = sources
    source = blocks if kind == "blocks" else row
    if kind not in world.caches:
        make(world, kind, Spec(len(source), len(source[0]), source[0].shape[1], blocks=kind == "blocks"), 3)
    target, cm, times = world.caches[kind], world.cm, []
    rows = list(range(len(source[0])))
    views = [view.reshape(len(rows), -1).view(np.uint8) for view in tensor_views(target)]
    call = (cm.pull_blocks, BLOCKS_KEY, target, rows, rows) if kind == "blocks" else (cm.pull_cache, key, target, 0)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for view in views:
            view[:] = 0
        times.append(timed(*call))
        for view, wanted in zip(views, source, strict=True):
            assert np.array_equal(view, wanted)
        time.sleep(0.0005)
    same_bytes(show(world, kind), moved(show(world, kind), source, [(each, each) for each in rows]))
    return times


def footprint(world: World) -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), anonymous_bytes()
