"""The rebind race: a key is bound to a new cache while a pull of the old one runs, again and again.

    python -m faults rebind --races 10000 --transport all

Every pull that succeeds must have brought the bytes of exactly one binding, one that was there while it ran; and a
binding may only have been consumed by a pull that brought its bytes. A pull counts as a race when the key left its
binding, for certain, after the pull had begun and before it ended, and the pull had found the key.
"""

from __future__ import annotations

import argparse
import time
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from faults import rebind_ends as ends
from faults.harness import Processes, Report, command
from faults.rebind_ends import KINDS, Binding, Pull

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

TRANSPORTS: Final = ("inproc", "shm", "tcp")
THREADS: Final = 2
#: Pulls between two looks at what came of them.
BATCH: Final = 1000
#: A pull that was no race is made again, but not for ever.
TRIES: Final = 50
_POOL_BYTES: Final = 16 << 20


@dataclass
class Race(Report):
    """What came of the pulls over one transport."""

    pulls: int = 0
    races: int = 0
    torn: int = 0
    bindings: int = 0
    consumed: int = 0

    @property
    def good(self) -> bool:
        """True when there were as many races as asked for, and nothing went wrong."""
        return super().good and self.races >= self.asked

    def add(self, bindings: list[Binding], pulls: list[Pull]) -> None:
        """Judge one batch."""
        self.bindings += len(bindings)
        self.pulls += len(pulls)
        self.consumed += sum(binding.consumed for binding in bindings)
        self.wrong_bytes += sum(pull.wrong for pull in pulls)
        self.outcomes.update(f"{pull.kind} {pull.outcome.name}" for pull in pulls)
        left = list(races(bindings, pulls))
        self.races += sum(number > 0 for number in left)
        # It had the old one in its hands: it failed for that, or brought it and ended just in time.
        self.torn += sum(
            number > 0 and (pull.outcome.name == "TransferFailed" or pull.number == number)
            for number, pull in zip(left, pulls, strict=True)
        )
        self.faults += judged(bindings, pulls)

    def line(self) -> str:
        """Return one row of the table."""
        numbers = (self.asked, self.pulls, self.races, self.torn, self.bindings, self.consumed, self.wrong_bytes)
        cells = "".join(f"{number:>10}" for number in (*numbers, len(self.faults)))
        return f"{self.transport:<7}{cells}{self.seconds:>8.0f}  {super().line()}"


HEAD: Final = (
    "            asked     pulls     races    of old  bindings  consumed     wrong    faults       s  outcomes of pulls"
)


def races(bindings: Iterable[Binding], pulls: Iterable[Pull]) -> Iterator[int]:
    """Yield for every pull which binding its key left while it ran, if it had found the key; else 0."""
    changes = {kind: sorted((b.leaving, b.gone, b.number) for b in bindings if b.kind == kind) for kind in KINDS}
    for pull in pulls:
        of_kind = changes[pull.kind]
        at = bisect_right(of_kind, (pull.began,))
        inside = (
            at < len(of_kind) and of_kind[at][1] < pull.ended and pull.outcome.name in ("success", "TransferFailed")
        )
        yield of_kind[at][2] if inside else 0


def judged(bindings: Sequence[Binding], pulls: Sequence[Pull]) -> Iterator[str]:
    """Yield what must not be."""
    of_number = {binding.number: binding for binding in bindings}
    brought = {pull.number for pull in pulls if pull.outcome.good}
    for pull in pulls:
        if not pull.outcome.typed:
            yield f"a pull ended with {pull.outcome}, which is no error of the library"
        if pull.outcome.good:
            yield from _one_binding(pull, of_number.get(pull.number))
    for binding in bindings:
        if binding.consumed and binding.number not in brought:
            yield f"binding {binding.number} was consumed, and no pull brought its bytes"


def _one_binding(pull: Pull, binding: Binding | None) -> Iterator[str]:
    if pull.wrong:
        yield f"a pull brought {pull.wrong} bytes beside those of binding {pull.number}"
    if binding is None or binding.kind != pull.kind:
        yield f"a pull of a {pull.kind} brought bytes of {pull.number}, which is no such binding of its time"
    elif pull.began > binding.gone:
        yield f"a pull brought the bytes of binding {pull.number}, which had gone before it began"


def run(transport: str, asked: int, seed: int = 1) -> Race:
    """Make pulls until so many of them were races."""
    race = Race(transport, asked)
    since = time.monotonic()
    with Processes(transport, _POOL_BYTES) as processes:
        owner = processes.owner()
        puller = processes.reader(owner)
        owner.do(ends.prepare_owner, transport)
        puller.do(ends.prepare_puller, THREADS)
        while race.races < asked and race.pulls < asked * TRIES:
            owner.do(ends.begin_binding, seed + race.pulls)
            pulls = puller.do(ends.pull_many, min(BATCH, asked), THREADS)
            race.add(owner.do(ends.end_binding), pulls)
    race.seconds = time.monotonic() - since
    return race


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the race over the transports asked for and print the table; 1 when anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--races", type=int, default=10_000, metavar="N", help="over each transport (10000)")
    parser.add_argument("--seed", type=int, default=1)

    def of_transport(transport: str, options: argparse.Namespace) -> Iterator[Report]:
        yield run(transport, options.races, options.seed)

    return command(parser, TRANSPORTS, HEAD, of_transport, arguments)
