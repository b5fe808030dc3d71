"""Trials: an end is stopped inside a copy (SIGSTOP) while the owner of the memory takes it back and uses it again.

    python -m faults trials --trials 1000 --transport all --what all

A reader that goes on later must fail or have every byte right; a writer that goes on must not have written, nor write,
a byte into the memory in its new use. Only trials count whose end was found stopped after the first byte of its copy
and before the last: by a look at every byte of the destination while nothing moved. What was stopped earlier or later
is judged too, and done again.

Two processes, the owner and the other end, beside this one, which signals and looks.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Final, Self

from faults import trial_ends as ends
from faults.harness import Outcome, Processes, Report, command
from faults.midcopy import stop_inside_copy
from faults.trial_ends import BLOCK, SOURCE, UNTOUCHED, WRITTEN, Ended, Shape, Taken, word
from tests.support.linking import links
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.support.ends import ChildEnd

TRANSPORTS: Final = ("shm", "cma", "tcp")
#: MiB a copy: so long that a signal finds it in the middle, also where all share one CPU. Of cma the kernel moves 4 MiB
#: before it looks at signals; of tcp what the sockets hold arrives although its sender is stopped.
SIZES: Final = {"shm": 32, "cma": 32, "tcp": 24}
KILL_EVERY: Final = 10
#: Milliseconds the owner waits for memory that does not come back meanwhile.
SHORT_MS: Final = 40
#: A trial that is not caught is done again, but not for ever.
TRIES: Final = 40


@dataclass
class TrialReport(Report):
    """What came of the trials of one kind."""

    what: str = ""
    tried: int = 0
    caught: int = 0
    reused: int = 0
    quarantines: int = 0
    killed: int = 0
    foreign_bytes: int = 0
    slowest_return: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> bool:
        """True when every trial asked for was caught and nothing went wrong in any, caught or not."""
        return super().good and self.caught >= self.asked and not self.foreign_bytes

    def line(self) -> str:
        """Return one row of the table."""
        numbers = (self.asked, self.tried, self.caught, self.reused, self.quarantines, self.killed)
        cells = "".join(f"{number:>8}" for number in numbers)
        return (
            f"{self.transport:<5}{self.what:<8}{cells}{self.wrong_bytes:>8}{self.foreign_bytes:>9}"
            f"{self.slowest_return * 1e3:>9.0f}{self.seconds:>8.0f}  {super().line()}"
            + "".join(f"; {count} times {name} to the owner" for name, count in sorted(self.refused.items()))
        )


HEAD: Final = (
    "                 asked   tried  caught  reused quarant.  killed   wrong  foreign  back ms       s  outcomes caught"
)


class Trials:
    """The two ends of all trials of one kind."""

    def __init__(self, processes: Processes, transport: str, what: str, shape: Shape) -> None:
        self.transport, self.what = transport, what
        self.reading = what == "reader"
        self.shape = shape
        self.number = 0
        self._processes = processes
        self.owner: ChildEnd = processes.owner(sync_kv_timeout=SHORT_MS)
        self.owner.do(ends.arena, shape, transport == "shm")
        self.other = self._born()

    @property
    def ways(self) -> tuple[str, ...]:
        """How the owner takes its memory back, in turns."""
        if not self.reading:
            return ends.WRITER_WAYS
        return ends.READER_WAYS if self.transport == "tcp" else ends.READER_WAYS[:-1]

    def run(self, count: int) -> TrialReport:
        """Make trials until so many were caught."""
        report = TrialReport(self.transport, count, what=self.what)
        since = time.monotonic()
        ways = cycle(self.ways)
        while report.caught < count and report.tried < count * TRIES:
            killed = not self.reading and report.caught % KILL_EVERY == KILL_EVERY // 2
            self.trial(report, next(ways), kill=killed)
        report.seconds = time.monotonic() - since
        return report

    def trial(self, report: TrialReport, way: str, *, kill: bool) -> None:
        """Make one trial and judge it."""
        self.number += 1
        report.tried += 1
        inside = self._stopped_inside(way)
        taken = self.owner.do(ends.take_back, self.shape, self.number, way, self.other.pid, self.reading)
        ended = self._go_on(kill=kill)
        returned = self.owner.do(ends.use_again, self.shape, self.number, way)
        pushed = not self.reading and ended.outcome.good and self.transport == "tcp"
        foreign = self.owner.do(ends.look_back, self.number, way, pushed)
        if kill:
            wait_until(lambda: self.owner.do(links) == {})
            self.other = self._born()
        caught = inside and taken.incomplete
        report.slowest_return = max(report.slowest_return, returned)
        report.foreign_bytes += foreign
        report.wrong_bytes += ended.wrong
        faults = self._faults(way, taken, ended) if caught else _untyped(ended)
        report.faults += [f"trial {self.number}, {way}: {fault}" for fault in faults]
        if caught and way != "keep":
            report.caught += 1
            report.reused += taken.reused
            report.quarantines += taken.quarantined > 0
            report.killed += kill
            report.outcomes[ended.outcome.name] += 1
            if taken.refused:
                report.refused[taken.refused] += 1

    def _stopped_inside(self, way: str) -> bool:
        """Begin a copy and stop it; True when that was in the middle."""
        shape, number = self.shape, self.number
        if self.reading:
            self.owner.do(ends.offer, shape, number, way, SOURCE)
            watched = [address + BLOCK for address in self.other.do(ends.poison, shape, number, UNTOUCHED)]
            arriving = SOURCE
        else:
            watched = self.owner.do(ends.begin_write, shape, number, way)
            self.other.do(ends.poison, shape, number, WRITTEN)
            arriving = WRITTEN
        with Watch(self.other.pid if self.reading else self.owner.pid, shape, watched, number, arriving) as watch:
            if self.reading:
                self.other.begin(ends.pull, shape, number, way)
            else:
                self.other.begin(ends.push, shape, number)
            return stop_inside_copy(self.other.pid, watch.begun, watch.ended)

    def _go_on(self, *, kill: bool) -> Ended:
        """Let the other end go on, or kill it as it stands there."""
        if kill:
            self.other.kill()
            return Ended(Outcome("killed"))
        self.other.signal(signal.SIGCONT)
        ended: Ended = self.other.finish()
        return ended

    def _faults(self, way: str, taken: Taken, ended: Ended) -> Iterator[str]:
        """Yield what must not be, of a trial that was caught."""
        yield from _untyped(ended)
        by_lanes = self.transport == "tcp"
        if way == "keep":
            if not ended.outcome.good:
                yield f"nothing happened to its source, and it ended with {ended.outcome}"
            return
        # Over lanes a reader may have got all that it still lacked from its own socket.
        if ended.outcome.good and not (by_lanes and self.reading):
            yield "it was inside the copy when its memory was taken back, and succeeded"
        if self.reading:
            if taken.reused != (way != "remove"):
                yield f"the owner {'got' if taken.reused else 'did not get'} the memory"
        elif by_lanes:
            if taken.refused or taken.quarantined or taken.reused != (way != "rebind"):
                yield f"its own lanes write, yet the owner got {taken}"
        elif taken != EXPECTED[way](self.shape.nbytes):
            yield f"the owner got {taken}"

    def _born(self) -> ChildEnd:
        other: ChildEnd = self._processes.reader(self.owner, first=ends.give_way)
        return other


#: What the owner gets while a writer that is not its own lanes is stopped.
EXPECTED: Final[dict[str, Callable[[int], Taken]]] = {
    "deallocate": lambda nbytes: Taken(reused=False, quarantined=nbytes),
    "full": lambda nbytes: Taken(reused=False, refused="OutOfMemory", named=True, quarantined=nbytes),
    "unregister": lambda nbytes: Taken(reused=False, refused="DeadlineExceeded", named=True),
    "rebind": lambda nbytes: Taken(reused=False),
}


def _untyped(ended: Ended) -> Iterator[str]:
    if not ended.outcome.typed:
        yield f"ended with what is no error of the library: {ended.outcome}"


class Watch:
    """Looks at the destination of a copy in another process. A context manager."""

    def __init__(self, pid: int, shape: Shape, addresses: Sequence[int], number: int, kind: int) -> None:
        self._fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        self._first = addresses[0], word(number, kind, 0, BLOCK // 8)
        # The last word of every block: while one of them is missing, the copy is not over.
        self._lasts = [
            (address + block * BLOCK - 8, word(number, kind, tensor, (block + 1) * BLOCK // 8 - 1))
            for tensor, address in enumerate(addresses)
            for block in range(shape.moved, 0, -1)
        ]

    def begun(self) -> bool:
        """Return True once the first word has arrived."""
        return self._there(self._first)

    def ended(self) -> bool:
        """Return True when the last words have."""
        return all(map(self._there, self._lasts))

    def _there(self, expected: tuple[int, int]) -> bool:
        address, value = expected
        return os.pread(self._fd, 8, address) == value.to_bytes(8, "little")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._fd)


def run(transport: str, what: str, count: int, mib: int | None = None) -> TrialReport:
    """Make ``count`` trials that count."""
    shape = Shape(mib or SIZES[transport])
    with Processes(
        transport,
        4 * shape.nbytes + 16 * BLOCK,
        page_shift=16,
        # One copying thread, so that the last byte is the last one.
        extra={"llm.PeerTimeout": "600", "llm.CopyThreads": "1"},
        enable_remote_cache_accessible=what == "writer",
    ) as processes:
        return Trials(processes, transport, what, shape).run(count)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials asked for and print the table; 1 when anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000, metavar="N", help="that count, of each kind (1000)")
    parser.add_argument("--what", choices=("reader", "writer", "all"), default="all")
    parser.add_argument("--mib", type=int, help="MiB a copy")

    def of_transport(transport: str, options: argparse.Namespace) -> Iterator[Report]:
        for what in ("reader", "writer") if options.what == "all" else (options.what,):
            yield run(transport, what, options.trials, options.mib)

    return command(parser, TRANSPORTS, HEAD, of_transport, arguments)
