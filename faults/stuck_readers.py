"""Readers that are stuck beside one that is not: how much do they delay it?

    python -m faults stuck-readers --readers 100 --transport tcp

The stuck ones live in one process, each with a link of its own. They pull 64 MiB again and again, and their process is
stopped (SIGSTOP) while all of them are inside a pull. The healthy one, in another process, is measured before, with and
after that, in turns; every byte that it pulls is compared. Printed too: what all TCP sockets of the host hold.
"""

from __future__ import annotations

import argparse
import mmap
import signal
import statistics
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from faults import stuck_ends as ends
from faults.harness import Processes, holds_within, say
from faults.midcopy import frozen, peek
from tests.support.frozen import freeze

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.ends import ChildEnd

TRIES: Final = 200
_POOL_BYTES: Final = 80 << 20


class Scene:
    """An owner, a crowd of readers, and a healthy one: three processes."""

    def __init__(self, processes: Processes, transport: str, readers: int) -> None:
        self.transport, self.readers = transport, readers
        self.owner: ChildEnd = processes.owner()
        self.owner.do(ends.offer, transport == "cma")
        self.healthy: ChildEnd = processes.reader(self.owner, "healthy")
        self.crowd: ChildEnd = processes.process("crowd")
        self._flags = self.crowd.do(ends.crowd, readers, self.owner.port, transport)
        processes.callback(self.crowd.do, ends.disperse)

    def stick(self) -> None:
        """Stop the crowd while all of them are inside a pull, over tcp with full sockets between them and the owner."""
        self.crowd.do(ends.start_pulling)
        for _ in range(TRIES):
            freeze(self.crowd)
            if self.stuck() == self.readers and self._filled():
                return
            self.crowd.signal(signal.SIGCONT)
        raise TimeoutError(f"{self.readers} readers were never inside a pull at the same time in {TRIES} looks")

    def _filled(self) -> bool:
        """Return True when most lanes are full: the owner has sent what they take. Large pulls use three of four."""
        return self.transport != "tcp" or holds_within(lambda: self.full() >= 2 * self.readers, 2.0)

    def stuck(self) -> int:
        """Return how many of the crowd are inside a pull, while their process is stopped."""
        assert frozen(self.crowd.pid)
        return sum(ends.flags(peek(self.crowd.pid, self._flags, 8 * self.readers)))

    def full(self) -> int:
        """Return how many sockets of the owner hold bytes that nobody takes."""
        full: int = self.owner.do(ends.clogged)
        return full

    def free(self) -> None:
        """Let the crowd go on and end; all that they pulled is right."""
        self.crowd.signal(signal.SIGCONT)
        self.crowd.do(ends.stop_pulling)

    def pull(self, count: int) -> float:
        """Have the healthy reader pull; return the median in milliseconds."""
        return statistics.median(self.healthy.do(ends.pull_healthy, count))


@contextmanager
def scene_of(transport: str, readers: int) -> Iterator[Scene]:
    """Make the three processes; end them afterwards."""
    with Processes(transport, _POOL_BYTES, extra={"llm.PeerTimeout": "600"}) as processes:
        yield Scene(processes, transport, readers)


def tcp_memory() -> int:
    """Return the bytes that the kernel holds for all TCP sockets of the host."""
    words = Path("/proc/net/sockstat").read_text("ascii").split("TCP:")[1].split()
    return int(words[words.index("mem") + 1]) * mmap.PAGESIZE


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when the healthy reader takes more than twice as long beside the stuck ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, default=100)
    parser.add_argument("--transport", choices=("tcp", "shm", "cma"), default="tcp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pulls", type=int, default=200, help="in each part of a round")
    options = parser.parse_args(arguments)
    without: list[float] = []
    beside: list[float] = []
    with scene_of(options.transport, options.readers) as scene:
        scene.pull(20)
        for turn in range(options.rounds):
            before = scene.pull(options.pulls)
            scene.stick()
            median = scene.pull(options.pulls)
            stuck, full, held = scene.stuck(), scene.full(), tcp_memory() / 2**20
            scene.free()
            after = scene.pull(options.pulls)
            without += [before, after]
            beside.append(median)
            say(
                f"round {turn}: median {before:.3f} ms before, {median:.3f} ms beside {stuck} stuck readers "
                f"({full} full sockets, {held:.0f} MiB held by TCP), {after:.3f} ms after"
            )
    ratio = statistics.median(beside) / statistics.median(without)
    say(f"{options.transport}: {options.readers} stuck readers, a healthy one takes {ratio:.2f} times as long")
    return 0 if ratio <= 2 else 1
