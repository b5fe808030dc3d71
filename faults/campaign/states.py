"""What a worker is doing when a fault comes: which pairs of fault and state a campaign has come to, and which not."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

STATES: Final = ("idle", "linking", "linked idle", "calls running", "draining", "redialling")
_BIT: Final = {state: 1 << number for number, state in enumerate(STATES)}
_CALLS: Final = {"link": "linking", "unlink": "draining", "pull": "calls running", "push": "calls running"}
_CALLS_TOO: Final = {"copy": "calls running", "swap": "calls running", "transfer": "calls running"}


def states_in(mask: int) -> list[str]:
    return [state for state, bit in _BIT.items() if mask & bit] or ["idle"]


class Doing:
    """What one worker does; several things at once. Any thread.

    Args:
        publish: Takes the mask whenever it changes.
    """

    def __init__(self, publish: Callable[[int], None]) -> None:
        self._publish = publish
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._linked = self._redialling = False
        self.mask = 0

    def change(self, kind: str, number: int) -> None:
        """A call of that kind begins (1), or has ended (-1)."""
        state = (_CALLS | _CALLS_TOO).get(kind.partition("_")[0])
        if state is not None:
            with self._lock:
                self._running[state] += number
                self._tell()

    def look(self, links: int, redials: int) -> None:
        """So many links there are, and so many are being dialled again."""
        with self._lock:
            self._linked, self._redialling = links > 0, redials > 0
            self._tell()

    def _tell(self) -> None:
        mask = sum(_BIT[state] for state, number in self._running.items() if number)
        mask |= _BIT["redialling"] * self._redialling
        # With a link, and nothing runs on any.
        mask |= _BIT["linked idle"] * (self._linked and not mask)
        self.mask = mask
        self._publish(mask)


class Cells:
    """Counts (fault, state). The supervisor's thread only."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(self, fault: str, states: Sequence[str], number: int = 1) -> None:
        for state in states:
            self.counts[fault, state] += number

    def as_dict(self) -> dict[str, dict[str, int]]:
        return {fault: {state: self.counts[fault, state] for state in STATES} for fault in self._faults()}

    def lines(self) -> Iterator[str]:
        yield f"{'faults by state':<18}" + "".join(f"{state:>15}" for state in STATES)
        for fault in self._faults():
            yield f"{fault:<18}" + "".join(f"{self.counts[fault, state]:>15,}" for state in STATES)
        empty = [
            f"{fault} while {state}" for fault in self._faults() for state in STATES if not self.counts[fault, state]
        ]
        yield f"{len(empty)} empty cells: {', '.join(empty) or 'none'}"

    def _faults(self) -> list[str]:
        return sorted({fault for fault, _ in self.counts})
