"""Readers that are stuck beside one that is not: how much do they delay it?

    python -m tests.faults.stuck_readers --readers 100 --transport tcp

The stuck ones live in one process, each with a link of its own. They pull 64 MiB again and again, and their process is
stopped (SIGSTOP) while all of them are inside a pull. The healthy one, in another process, is measured before, with and
after that, in turns; every byte that it pulls is compared.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.faults import stuck_ends as ends
from tests.faults.midcopy import frozen, peek
from tests.support.ends import ChildEnd
from tests.support.linking import SUCCESS, info, link
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Scene", "main"]

TRIES: Final = 200


@dataclass
class Scene:
    """An owner, a crowd of readers, and a healthy one: three processes. A context manager."""

    transport: str
    readers: int
    _undo: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Scene:
        extra = {"llm.Transport": self.transport, "llm.PeerTimeout": "600"}
        settings: dict[str, Any] = {
            "extra": extra,
            "mem_pool_cfg": f'{{"memory_size": {80 << 20}, "page_shift": 12}}',
            "host_mem_pool_cfg": None,
        }
        with ExitStack() as undo:
            self.owner, self.healthy, self.crowd = [self._child(undo, each) for each in ("owner", "healthy", "crowd")]
            self.owner.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", **settings)
            self.owner.do(ends.offer, self.transport == "cma")
            self.healthy.start("DECODER", 2, **settings)
            assert self.healthy.do(link, [info(1, self.owner.port)]) == SUCCESS
            self._flags = self.crowd.do(ends.crowd, self.readers, self.owner.port, self.transport)
            undo.callback(self.crowd.do, ends.disperse)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()

    @staticmethod
    def _child(undo: ExitStack, name: str) -> ChildEnd:
        child = ChildEnd(name)
        undo.callback(child.close)
        return child

    def stick(self) -> None:
        """Stop the crowd while all of them are inside a pull, over tcp with full sockets between them and the owner."""
        self.crowd.do(ends.start_pulling)
        for _ in range(TRIES):
            self.crowd.signal(signal.SIGSTOP)
            wait_until(lambda: frozen(self.crowd.pid))
            if self.stuck() == self.readers and self._filled():
                return
            self.crowd.signal(signal.SIGCONT)
        raise TimeoutError(f"{self.readers} readers were never inside a pull at the same time in {TRIES} looks")

    def _filled(self) -> bool:
        """Return True when most lanes are full: the owner has sent what they take. Large pulls use three of four."""
        if self.transport != "tcp":
            return True
        limit = time.monotonic() + 2.0
        while self.full() < 2 * self.readers and time.monotonic() < limit:
            time.sleep(0.01)
        return self.full() >= 2 * self.readers

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
        problems = self.crowd.do(ends.stop_pulling)
        assert not problems, problems

    def pull(self, count: int) -> float:
        """Have the healthy reader pull; return the median in milliseconds."""
        return statistics.median(self.healthy.do(ends.pull_healthy, count))


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
    with Scene(options.transport, options.readers) as scene:
        scene.pull(20)
        for turn in range(options.rounds):
            before = scene.pull(options.pulls)
            scene.stick()
            median = scene.pull(options.pulls)
            stuck, full = scene.stuck(), scene.full()
            scene.free()
            after = scene.pull(options.pulls)
            without += [before, after]
            beside.append(median)
            _say(
                f"round {turn}: median {before:.3f} ms before, {median:.3f} ms beside {stuck} stuck readers "
                f"({full} full sockets), {after:.3f} ms after"
            )
    ratio = statistics.median(beside) / statistics.median(without)
    _say(f"{options.transport}: {options.readers} stuck readers, a healthy one takes {ratio:.2f} times as long")
    return 0 if ratio <= 2 else 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
