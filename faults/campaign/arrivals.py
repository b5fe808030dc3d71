"""How often calls came to each step of a transfer, and which steps a campaign has to come to.

A step that no call comes to any more is tested no more, whatever the gates of a campaign are set to.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from faults.gates import STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from faults.campaign.epochs import Epoch

_EVERY_KIND: Final = (
    *("hold", "link", "ask", "asked", "target asked", "target answered"),
    *("answer", "resolved", "plan", "before copy", "after copy"),
)
_PINNED: Final = ("release", "released", "target release", "target released")
_PUSHED: Final = ("before write", "after write", "consumed", "target consumed")

#: Steps that every finished epoch comes to, by the transport that is forced and by whether it pushes. Over tcp the
#: owner of the memory compares the guards.
EXPECTED: Final[Mapping[tuple[str, bool], frozenset[str]]] = {
    ("shm", False): frozenset((*_EVERY_KIND, *_PINNED, "guards")),
    ("shm", True): frozenset((*_EVERY_KIND, *_PUSHED, "guards")),
    ("cma", False): frozenset((*_EVERY_KIND, *_PINNED, "guards")),
    ("cma", True): frozenset((*_EVERY_KIND, *_PUSHED, "guards")),
    ("tcp", False): frozenset((*_EVERY_KIND, *_PINNED)),
    ("tcp", True): frozenset((*_EVERY_KIND, *_PUSHED)),
}


class Arrivals:
    """Adds up the arrivals of all workers. The supervisor's thread only."""

    def __init__(self) -> None:
        #: By step and transport of the link; a step before there is a link has none.
        self.counts: Counter[tuple[str, str]] = Counter()
        self._of_epoch: Counter[str] = Counter()

    def add(self, arrivals: Mapping[str, int]) -> None:
        for key, number in arrivals.items():
            step, _, transport = key.partition(", ")
            self.counts[step, transport] += number
            self._of_epoch[step] += number

    def end_epoch(self, epoch: Epoch, *, finished: bool) -> list[str]:
        """Begin to count the next epoch; return the steps that this one should have come to."""
        missing = EXPECTED.get((epoch.transport, epoch.rca), frozenset()) - set(self._of_epoch)
        self._of_epoch.clear()
        return sorted(missing) if finished else []

    def as_dict(self) -> dict[str, dict[str, int]]:
        return {
            transport: {step: number for (step, of), number in self.counts.items() if of == transport}
            for transport in self._transports()
        }

    def lines(self) -> Iterator[str]:
        transports = self._transports()
        yield f"{'arrivals at steps':<26}" + "".join(f"{transport or 'no link':>12}" for transport in transports)
        for step in STEPS:
            counts = [self.counts[step, transport] for transport in transports]
            if any(counts):
                yield f"{step:<26}" + "".join(f"{count:>12,}" for count in counts)

    def _transports(self) -> list[str]:
        return sorted({transport for _, transport in self.counts})
