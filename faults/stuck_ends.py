"""The ends of `faults/stuck_readers.py`: an owner, many readers in one process, a healthy one in another."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from faults.harness import Threads, numbered, words_of
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMDataDist, LLMRole
from tests.support.linking import SUCCESS, info
from tests.support.world import make_config

if TYPE_CHECKING:
    from faults.harness import Words
    from tests.support.world import World

KEY: Final = BlocksCacheKey(1, 0)
BLOCK: Final = 256 << 10
#: What a stuck reader asks for, and what the healthy one does.
ASKED, HEALTHY = 256, 4
DESC: Final = CacheDesc(1, [ASKED, BLOCK], DataType.DT_UINT8)


def _words(first: int, blocks: int) -> Words:
    return numbered((1 << 48) + first * BLOCK // 8, blocks * BLOCK // 8)


def offer(world: World, private: bool) -> None:
    """Make the owner's cache; every word says where it is."""
    if private:
        world.memory["kv"] = memory = np.zeros(ASKED * BLOCK // 8, np.uint64)
        world.caches["kv"] = world.cm.register_blocks_cache(DESC, [memory.ctypes.data], KEY)
    else:
        world.caches["kv"] = world.cm.allocate_blocks_cache(DESC, KEY)
        (memory,) = words_of(world.caches["kv"])
    memory[:] = _words(0, ASKED)


def clogged(world: World) -> int:
    """Return how many sockets of this process hold bytes that their peers do not take."""
    return sum(_unsent(int(fd)) > 0 for fd in os.listdir("/proc/self/fd"))


def _unsent(fd: int) -> int:
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            return 0
        return int(struct.unpack("i", fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:  # the listing's own descriptor, or no stream
        return 0


class Crowd(Threads):
    """Readers of one process, each with a link of its own. All pull into one memory: the bytes are the same."""

    def __init__(self, count: int, port: int, transport: str) -> None:
        super().__init__()
        self._into = np.zeros(ASKED * BLOCK // 8, np.uint64)
        #: Odd while a reader is inside a pull.
        self.counts = np.zeros(count, np.uint64)
        self._readers: list[LLMDataDist] = []
        extra = {"llm.Transport": transport, "llm.PeerTimeout": "600", "llm.CopyThreads": "1"}
        for number in range(count):
            reader = LLMDataDist(LLMRole.DECODER, 100 + number)
            reader.init(make_config(extra=extra, mem_pool_cfg=None, host_mem_pool_cfg=None, sync_kv_timeout=600_000))
            self._readers.append(reader)
            assert reader.link_clusters([info(1, port)], 10_000) == SUCCESS

    def start_pulling(self) -> None:
        """Have all of them pull, again and again."""
        self.stop.clear()
        self.counts[:] = 0
        for number, reader in enumerate(self._readers):
            self.start(self._pull, number, reader)

    def _pull(self, number: int, reader: LLMDataDist) -> None:
        cm, everything = reader.cache_manager, list(range(ASKED))
        mine = cm.register_blocks_cache(DESC, [self._into.ctypes.data])
        try:
            while not self.stop.is_set():
                self.counts[number] += 1
                cm.pull_blocks(KEY, mine, everything, everything)
                self.counts[number] += 1
        finally:
            cm.unregister_cache(mine.cache_id)

    def stop_pulling(self) -> None:
        """Let them end their pulls, all of which are right."""
        self.join()
        np.testing.assert_array_equal(self._into, _words(0, ASKED))

    def finalize(self) -> None:
        """End all links."""
        for reader in self._readers:
            reader.finalize()


def crowd(world: World, count: int, port: int, transport: str) -> int:
    """Make the readers and link them; return where :attr:`Crowd.counts` is."""
    world.memory["crowd"] = made = Crowd(count, port, transport)
    return int(made.counts.ctypes.data)


def flags(raw: bytes) -> list[bool]:
    """Return which readers are inside a pull, by the bytes of :attr:`Crowd.counts`."""
    return [bool(count % 2) for count in np.frombuffer(raw, np.uint64)]


def start_pulling(world: World) -> None:
    world.memory["crowd"].start_pulling()


def stop_pulling(world: World) -> None:
    world.memory["crowd"].stop_pulling()


def disperse(world: World) -> None:
    world.memory.pop("crowd").finalize()


def pull_healthy(world: World, count: int) -> list[float]:
    """Pull blocks so often, compare every byte, and return the milliseconds that each pull took."""
    if "mine" not in world.caches:
        world.caches["mine"] = world.cm.allocate_blocks_cache(CacheDesc(1, [HEALTHY, BLOCK], DataType.DT_UINT8))
    mine = world.caches["mine"]
    (words,) = words_of(mine)
    times = []
    for turn in range(count):
        first = turn % (ASKED - HEALTHY)
        words[:] = 0
        since = time.perf_counter()
        world.cm.pull_blocks(KEY, mine, list(range(first, first + HEALTHY)), list(range(HEALTHY)))
        times.append((time.perf_counter() - since) * 1e3)
        np.testing.assert_array_equal(words, _words(first, HEALTHY))
    return times
