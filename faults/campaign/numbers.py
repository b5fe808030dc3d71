"""Numbers of a campaign: how late calls return, how soon bytes move again after a fault, and what grows.

Times that come from a journal are counted in classes of a twentieth of a decade of milliseconds.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_CLASSES: Final = 20
_QUANTILES: Final = {"p50": 0.5, "p99.9": 0.999, "max": 1.0}


def class_of(seconds: float) -> int:
    return round(_CLASSES * math.log10(max(seconds * 1e3, 1e-3)))


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {name: ordered[math.ceil(part * len(ordered)) - 1] for name, part in _QUANTILES.items()} if ordered else {}


def overruns(classes: Mapping[int, int]) -> dict[str, float]:
    """Return quantiles, in seconds, of the times for which calls went past their deadline."""
    counted = Counter({number: count for number, count in classes.items() if count})
    return _quantiles([10 ** (each / _CLASSES) / 1e3 for each in counted.elements()])


@dataclass(frozen=True)
class _Waiting:
    kind: str
    since_ns: int
    moved: Callable[[int], bool]


class Recoveries:
    """From the end of a fault to the first good pull that began after it. The supervisor's thread only."""

    def __init__(self) -> None:
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self.unseen: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []

    def begin(self, kind: str, moved: Callable[[int], bool], since_ns: int | None = None) -> None:
        """A fault is over: ``moved(ns)`` says whether a good pull has begun after that moment."""
        self._waiting.append(_Waiting(kind, since_ns or time.monotonic_ns(), moved))

    def look(self) -> None:
        now = time.monotonic_ns()
        for each in [each for each in self._waiting if each.since_ns < now and each.moved(each.since_ns)]:
            self.times[each.kind].append((now - each.since_ns) / 1e9)
            self._waiting.remove(each)

    def forget(self) -> None:
        """The epoch's faults are over; what has not been seen yet has to be seen after healing."""
        self.unseen.update(each.kind for each in self._waiting)
        self._waiting.clear()

    def as_dict(self) -> dict[str, dict[str, float]]:
        kinds = sorted({*self.times, *self.unseen})
        return {
            kind: _quantiles(self.times[kind]) | {"seen": len(self.times[kind]), "unseen": self.unseen[kind]}
            for kind in kinds
        }

    def lines(self) -> Iterator[str]:
        yield f"{'s to a good pull after':<26}{'p50':>9}{'p99.9':>9}{'max':>9}{'seen':>9}{'epoch over':>12}"
        for kind, row in self.as_dict().items():
            times = "".join(f"{row.get(name, math.nan):>9.3f}" for name in _QUANTILES)
            yield f"{kind:<26}{times}{row['seen']:>9,}{row['unseen']:>12,}"


class Growth:
    """What processes hold at the end of each epoch, and by how much it grows in an hour: one slope for all processes,
    each with a level of its own. The supervisor's thread only."""

    def __init__(self) -> None:
        self._samples: defaultdict[int, list[tuple[float, dict[str, float]]]] = defaultdict(list)

    def add(self, pid: int, sample: dict[str, float]) -> None:
        self._samples[pid].append((time.monotonic() / 3600, sample))

    def as_dict(self) -> dict[str, float]:
        """Return the slopes per hour; empty before any process was seen twice."""
        series = [each for each in self._samples.values() if len(each) > 1]
        names = series[0][0][1] if series else ()
        return {name: self._slope(series, name) for name in names}

    def lines(self) -> Iterator[str]:
        count = sum(len(each) for each in self._samples.values() if len(each) > 1)
        yield f"{'growth in an hour':<26}{'slope':>12}   ({count} samples of processes seen twice or more)"
        for name, slope in self.as_dict().items():
            yield f"{name:<26}{slope:>12,.1f}"

    @staticmethod
    def _slope(series: list[list[tuple[float, dict[str, float]]]], name: str) -> float:
        times = [np.array([at for at, _ in each]) for each in series]
        values = [np.array([sample[name] for _, sample in each]) for each in series]
        x = np.concatenate([each - each.mean() for each in times])
        y = np.concatenate([each - each.mean() for each in values])
        return float((x * y).sum() / (x * x).sum())
