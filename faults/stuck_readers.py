"""Readers that are stuck beside one that is not: how much do they delay it?

    python -m faults stuck-readers --readers 100 --transport tcp

The stuck ones live in one process, each with a link of its own. They pull 64 MiB again and again, and their process is
stopped (SIGSTOP) while all of them are inside a pull. The healthy one, in another process, is measured before, with and
after that, in turns; every byte that it pulls is compared.
"""

import argparse
import fcntl
import os
import signal
import statistics
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np

from faults.harness import Processes, Threads, Words, holds_within, numbered, timed, words_of
from faults.midcopy import frozen, peek
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMDataDist, LLMRole
from tests.support.ends import ChildEnd, freeze
from tests.support.linking import SUCCESS, info
from tests.support.world import World, make_config

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


def clogged(world: World) -> dict[str, int]:
    """Return the sockets of this process that hold bytes which their peers do not take, and how many."""
    held = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor, or no stream
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                (nbytes,) = struct.unpack("i", fcntl.ioctl(int(fd), termios.TIOCOUTQ, bytes(4)))
                if nbytes:
                    held[fd] = nbytes
    return held


def lanes_of(world: World, peer: int) -> int:
    return len(world.probe.loads(peer))


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
        self.join()
        np.testing.assert_array_equal(self._into, _words(0, ASKED))

    def finalize(self) -> None:
        for reader in self._readers:
            reader.finalize()


def crowd(world: World, count: int, port: int, transport: str) -> int:
    """Make the readers and link them; return where :attr:`Crowd.counts` is."""
    world.memory["crowd"] = made = Crowd(count, port, transport)
    return int(made.counts.ctypes.data)


def tell(world: World, what: str) -> None:
    """Have the readers do that."""
    getattr(world.memory["crowd"], what)()


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
        blocks = list(range(first, first + HEALTHY))
        times.append(timed(world.cm.pull_blocks, KEY, mine, blocks, list(range(HEALTHY))))
        np.testing.assert_array_equal(words, _words(first, HEALTHY))
    return times


# --- the scene --------------------------------------------------------------------------------------------------------

#: Looks stop the crowd, and its threads must get on between them.
_LOOKS_S, _RUN_S = 240.0, 0.01
_POOL_BYTES: Final = 80 << 20


class Scene:
    """An owner, a crowd of readers, and a healthy one: three processes."""

    def __init__(self, processes: Processes, transport: str, readers: int) -> None:
        self.transport, self.readers = transport, readers
        self.owner: ChildEnd = processes.owner()
        self.owner.do(offer, transport == "cma")
        self.healthy: ChildEnd = processes.reader(self.owner, "healthy")
        self.crowd: ChildEnd = processes.process("crowd")
        self._flags = self.crowd.do(crowd, readers, self.owner.port, transport)
        processes.callback(self.crowd.do, tell, "finalize")

    def stick(self) -> None:
        """Stop the crowd while all of them are inside a pull, over tcp with full sockets between them and the owner."""
        self.crowd.do(tell, "start_pulling")

        def stuck() -> bool:
            freeze(self.crowd)
            if self.stuck() == self.readers and self.filled(2.0):
                return True
            self.crowd.signal(signal.SIGCONT)
            return False

        if not holds_within(stuck, _LOOKS_S, every=_RUN_S):
            self.free()  # so that its links can end
            raise TimeoutError(f"{self.readers} readers were never inside a pull at the same time in {_LOOKS_S:.0f} s")

    def filled(self, seconds: float) -> bool:
        """Return True when half of the lanes for large pulls are full, and stay so: the owner has sent what they take.

        Bytes on their way are held, too: those of a pull's end leave, and its lane is empty for as long as it is stuck.
        """
        if self.transport != "tcp":
            return True
        bulk = self.owner.do(lanes_of, 100) - 1
        assert bulk > 0
        held: dict[str, int] = {}

        def still_full() -> bool:
            nonlocal held
            before, held = held, self.owner.do(clogged)
            return 2 * len(before.items() & held.items()) >= self.readers * bulk

        return holds_within(still_full, seconds)

    def stuck(self) -> int:
        assert frozen(self.crowd.pid)
        return int((np.frombuffer(peek(self.crowd.pid, self._flags, 8 * self.readers), np.uint64) % 2).sum())

    def free(self) -> None:
        self.crowd.signal(signal.SIGCONT)
        self.crowd.do(tell, "stop_pulling")

    def pull(self, count: int) -> float:
        return statistics.median(self.healthy.do(pull_healthy, count))


@contextmanager
def scene_of(transport: str, readers: int) -> Iterator[Scene]:
    with Processes(transport, _POOL_BYTES, extra={"llm.PeerTimeout": "600"}) as processes:
        yield Scene(processes, transport, readers)


def measure(options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    """Have a healthy reader pull before, beside and after the stuck ones, in rounds."""
    for transport in options.transport:
        without: list[float] = []
        beside: list[float] = []
        with scene_of(transport, options.readers) as scene:
            scene.pull(20)
            for turn in range(options.rounds):
                before = scene.pull(options.pulls)
                scene.stick()
                median = scene.pull(options.pulls)
                stuck = scene.stuck()
                scene.free()
                after = scene.pull(options.pulls)
                without += [before, after]
                beside.append(median)
                text = (
                    f"median {before:.3f} ms before, {median:.3f} ms beside {stuck} stuck readers, {after:.3f} ms after"
                )
                yield f"round {turn}: {text}", True
        ratio = statistics.median(beside) / statistics.median(without)
        text = f"{transport}: {options.readers} stuck readers, a healthy one takes {ratio:.2f} times as long"
        yield text, ratio <= 2


OPTIONS: Final = {
    "readers": (100, ""),
    "transport": (("tcp", "shm", "cma"), ""),
    "rounds": (5, ""),
    "pulls": (200, "in each part of a round"),
}
