"""Strangers at a listener: what do 2,000 connections that greet cost a linked peer, and the process that listens?

    python -m faults crowd

The strangers live in this process, and dial again when they are hung up on, at a rate. Meanwhile a linked peer pulls,
by blocks and by key: the second asks the owner's control thread, which also greets the strangers; remote cache access
is on, so that nothing is consumed. Every byte that it pulls is compared. Printed are its times quiet, beside strangers
elsewhere (they dial a third instance, in a process of its own) and beside strangers here (they dial the owner), in
turns. Strangers take CPU wherever they dial: the owner answers for the time here over the time elsewhere.
"""

import argparse
import asyncio
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import product
from typing import Any, Final, Self

import numpy as np

from faults.harness import timed
from faults.strangers import hello_of
from llm_datadist import BlocksCacheKey, CacheKeyByIdAndIndex
from llm_datadist._links import messages as wire
from llm_datadist.views import tensor_views
from tests.support.ends import ChildEnd
from tests.support.linking import SUCCESS, info, link, start_both
from tests.support.moves import Spec, make, moved, same_bytes, show
from tests.support.world import World, anonymous_bytes

#: What a stranger does once it is connected: says a Hello and stays, says it and goes, says it in two halves of which
#: the second never comes, or says nothing.
MANNERS: Final = ("stays", "goes", "stops", "silent")
CROWD: Final = 2_000
BLOCKS_KEY: Final = BlocksCacheKey(1, 0)
#: Strangers on their way at a time: the queue of a listener is not longer, and a second passes before one comes again.
_COMING: Final = 100
_KINDS: Final = ("blocks", "key")
#: Here over elsewhere, at most: quantile -> ratio. The second is for hold-ups: it depends more on who gets a core.
_RATIOS: Final = {0.5: 2.0, 0.99: 10.0}
REALTIME: Final = "both ends go first, where others use the machine too"


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

    def __len__(self) -> int:
        return len(self._here)

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
    """Pull for some seconds, by blocks or by key; return how long each pull took (ms). The last one's bytes are right.

    Between two pulls all bytes are changed, and after each the first and the last of each tensor are compared.
    """
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


def _beside(decoder: ChildEnd, crowd: Crowd, size: int, rate: float, *call: Any) -> list[float]:
    """Let strangers come, at most ``rate`` in a second and ``size`` at a time, while the decoder pulls."""
    decoder.begin(pull, *call)
    since, dialled = time.monotonic(), 0
    while not decoder.answered():
        due = int((time.monotonic() - since) * rate) - dialled
        for _ in range(min(due, size - len(crowd), 50)):
            crowd.dial()
            dialled += 1
        crowd.serve(0.001)
    times: list[float] = decoder.finish()
    return times


def go_first(_: World) -> None:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


@contextmanager
def measured_ends(transport: str, *, realtime: bool) -> Iterator[tuple[ChildEnd, ChildEnd]]:
    with ExitStack() as stack:
        prompt, decoder = (ChildEnd(name, fresh=True) for name in ("prompt", "decoder"))
        stack.callback(prompt.close)
        stack.callback(decoder.close)
        if realtime:
            prompt.do(go_first)
            decoder.do(go_first)
        start_both(prompt, decoder, transport, enable_remote_cache_accessible=True)
        yield prompt, decoder


def measure(options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    for transport, manner, kind in product(options.transport, options.manners, _KINDS):
        with ExitStack() as stack:
            prompt, decoder = stack.enter_context(measured_ends(transport, realtime=options.realtime))
            elsewhere = stack.enter_context(closing(ChildEnd("elsewhere", fresh=True)))
            elsewhere.start("PROMPT", 3, listen_ip_info="127.0.0.1:0", extra={"llm.Transport": transport})
            sources = prompt.do(prepare)
            assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
            decoder.do(pull, kind, sources, 1.0)
            times: dict[str, list[float]] = {"quiet": [], "elsewhere": [], "here": []}
            before, came = prompt.do(footprint), Counter[str]()
            call = kind, sources, options.seconds
            for _ in range(options.rounds):
                times["quiet"] += decoder.do(pull, *call)
                for where, end in (("elsewhere", elsewhere), ("here", prompt)):
                    assert end.port is not None
                    with Crowd(end.port, [manner]) as crowd:
                        times[where] += _beside(decoder, crowd, options.strangers, options.rate, *call)
                        after = prompt.do(footprint)
                    time.sleep(0.3)
                came += crowd.counts
        p50, p99 = ({where: np.quantile(each, part) for where, each in times.items()} for part in _RATIOS)
        ratios = [float(each["here"] / each["elsewhere"]) for each in (p50, p99)]
        text = "; ".join(f"{where} p50 {p50[where]:.3f} p99 {p99[where]:.3f} ms" for where in times)
        text += f" max {max(times['here']):.3f} ({len(times['here'])} pulls); {ratios[0]:.2f} and {ratios[1]:.2f} "
        text += f"times those of elsewhere; {came['said']} came, {came['welcomed']} welcomed; "
        text += f"+{after[0] - before[0]} descriptors, {(after[1] - before[1]) / 2**20:+.1f} MiB"
        right = all(ratio <= most for ratio, most in zip(ratios, _RATIOS.values(), strict=True))
        yield f"{transport:4} by {kind:6} {manner:6}: {text}", right


OPTIONS: Final = {
    "strangers": (CROWD, "connections at a time"),
    "rate": (1_000.0, "connections in a second"),
    "seconds": (2.0, "of each part of a round"),
    "rounds": (3, ""),
    "transport": (("tcp", "shm"), ""),
    "manners": (MANNERS, ""),
    "realtime": (False, REALTIME),
}
