"""The rebind race: a key is bound to a new cache while a pull of the old one runs, again and again.

    python -m tests.faults.rebind_race --races 10000 --transport all

Every pull that succeeds must have brought the bytes of exactly one binding, one that was there while it ran; and a
binding may only have been consumed by a pull that brought its bytes. A pull counts as a race when the key left its
binding, for certain, after the pull had begun and before it ended, and the pull had found the key.
"""

from __future__ import annotations

import argparse
import sys
import time
from bisect import bisect_right
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.faults import rebind_ends as ends
from tests.faults.rebind_ends import KINDS, Binding, Pull
from tests.support.ends import ChildEnd, LocalEnd
from tests.support.linking import SUCCESS, info, link

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Race", "main", "run"]

TRANSPORTS: Final = ("inproc", "shm", "tcp")
THREADS: Final = 2
#: Pulls between two looks at what came of them.
BATCH: Final = 1000
#: A pull that was no race is made again, but not for ever.
TRIES: Final = 50


@dataclass
class Race:
    """What came of the pulls over one transport."""

    transport: str
    asked: int
    pulls: int = 0
    races: int = 0
    torn: int = 0
    bindings: int = 0
    consumed: int = 0
    wrong_bytes: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """True when there were as many races as asked for, and nothing went wrong."""
        return self.races >= self.asked and not self.wrong_bytes and not self.faults

    def add(self, bindings: list[Binding], pulls: list[Pull]) -> None:
        """Judge one batch."""
        self.bindings += len(bindings)
        self.pulls += len(pulls)
        self.consumed += sum(binding.consumed for binding in bindings)
        self.wrong_bytes += sum(pull.wrong for pull in pulls)
        self.outcomes.update(f"{pull.kind} {pull.outcome}" for pull in pulls)
        left = list(races(bindings, pulls))
        self.races += sum(number > 0 for number in left)
        # It had the old one in its hands: it failed for that, or brought it and ended just in time.
        self.torn += sum(
            number > 0 and (pull.outcome == "TransferFailed" or pull.number == number)
            for number, pull in zip(left, pulls, strict=True)
        )
        self.faults += judged(bindings, pulls)

    def line(self) -> str:
        """Return one row of the table."""
        numbers = (self.asked, self.pulls, self.races, self.torn, self.bindings, self.consumed, self.wrong_bytes)
        cells = "".join(f"{number:>10}" for number in (*numbers, len(self.faults)))
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        return f"{self.transport:<7}{cells}{self.seconds:>8.0f}  {outcomes}"


HEAD: Final = (
    "            asked     pulls     races    of old  bindings  consumed     wrong    faults       s  outcomes of pulls"
)


def races(bindings: Iterable[Binding], pulls: Iterable[Pull]) -> Iterator[int]:
    """Yield for every pull which binding its key left while it ran, if it had found the key; else 0."""
    changes = {kind: sorted((b.leaving, b.gone, b.number) for b in bindings if b.kind == kind) for kind in KINDS}
    for pull in pulls:
        of_kind = changes[pull.kind]
        at = bisect_right(of_kind, (pull.began,))
        inside = at < len(of_kind) and of_kind[at][1] < pull.ended and pull.outcome in ("success", "TransferFailed")
        yield of_kind[at][2] if inside else 0


def judged(bindings: Sequence[Binding], pulls: Sequence[Pull]) -> Iterator[str]:
    """Yield what must not be."""
    of_number = {binding.number: binding for binding in bindings}
    brought = {pull.number for pull in pulls if pull.outcome == "success"}
    for pull in pulls:
        if not pull.typed:
            yield f"a pull ended with {pull.outcome}, which is no error of the library"
        if pull.outcome == "success":
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
    with ExitStack() as undo:
        owner, puller = _ends(transport, undo)
        while race.races < asked and race.pulls < asked * TRIES:
            owner.do(ends.begin_binding, seed + race.pulls)
            pulls = puller.do(ends.pull_many, min(BATCH, asked), THREADS)
            race.add(owner.do(ends.end_binding), pulls)
    race.seconds = time.monotonic() - since
    return race


def _ends(transport: str, undo: ExitStack) -> tuple[Any, Any]:
    """Return the owner and the end that pulls, linked."""
    owner: LocalEnd | ChildEnd
    puller: LocalEnd | ChildEnd
    if transport == "inproc":
        owner, puller = LocalEnd("owner"), LocalEnd("puller")
    else:
        owner, puller = ChildEnd("owner"), ChildEnd("puller")
        undo.callback(owner.close)
        undo.callback(puller.close)
    settings: dict[str, Any] = {
        "extra": {"llm.Transport": transport},
        "mem_pool_cfg": f'{{"memory_size": {16 << 20}, "page_shift": 12}}',
        "host_mem_pool_cfg": None,
    }
    undo.callback(owner.stop)
    undo.callback(puller.stop)
    owner.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", **settings)
    puller.start("DECODER", 2, **settings)
    owner.do(ends.prepare_owner, transport)
    puller.do(ends.prepare_puller, THREADS)
    assert puller.do(link, [info(1, owner.port)]) == SUCCESS
    return owner, puller


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the race over the transports asked for and print the table; 1 when anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--races", type=int, default=10_000, metavar="N", help="over each transport (10000)")
    parser.add_argument("--transport", choices=(*TRANSPORTS, "all"), default="all")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    good = True
    _say(HEAD)
    for transport in TRANSPORTS if options.transport == "all" else (options.transport,):
        race = run(transport, options.races, options.seed)
        good &= race.good
        _say(race.line())
        for fault in race.faults[:20]:
            _say(f"    {fault}")
    return 0 if good else 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
