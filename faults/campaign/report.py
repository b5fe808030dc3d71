"""What came of a campaign: the counts of all workers together, the table, and the first violations in detail."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from faults.campaign.arrivals import Arrivals
from faults.campaign.numbers import Growth, Recoveries, overruns
from faults.campaign.states import Cells

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from faults.campaign.epochs import Epoch
    from faults.campaign.schedule import Event

#: What makes a campaign fail, each with its line in the table.
VIOLATIONS: Final = (
    "wrong bytes",
    "false mismatches",
    "hangs",
    "leaks",
    "untyped errors",
    "internal errors",
    "keys",
    "not healed",
    "crashes",
    "steps not reached",
)
_SHOWN: Final = 8
_SHOWN_EVENTS: Final = 25
_SHOWN_TEXT: Final = 3000
_COMPLAINTS: Final = ("Traceback", "Exception ignored", "Warning", "Fatal Python error", "terminate called")


class Report:
    """Reads what the workers wrote. The supervisor's thread only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start = time.monotonic()
        self.calls: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.arrivals = Arrivals()
        self.violations: list[dict[str, Any]] = []
        self.worst = 0.0
        self.slowest = 0.0
        self.overruns: Counter[int] = Counter()
        self.cells = Cells()
        self.recoveries = Recoveries()
        self.growth = Growth()
        self._epoch: Epoch | None = None
        self._epoch_start = 0.0
        self._events: list[str] = []
        self._read: set[str] = set()
        self._complained: dict[str, int] = {}

    def begin(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._epoch_start = time.monotonic()
        self._events.clear()
        self.counts["epochs"] += 1

    def happened(self, event: Event, states: Sequence[str]) -> None:
        """A fault has been brought about, to a worker that was in these states."""
        if event.what not in {"lull", "resume"}:  # no faults, these
            self.cells.add(event.what, states)
        self.faults[event.what] += 1
        self._events.append(f"{time.monotonic() - self._epoch_start:6.2f} s: {event}")

    def phase(self, what: str) -> None:
        self._events.append(f"{time.monotonic() - self._epoch_start:6.2f} s: {what}")

    def violation(self, what: str, text: str) -> None:
        """The supervisor has seen something that must not be."""
        self.violations.append(self._placed({"what": what, "who": "supervisor", "at": time.monotonic(), "text": text}))

    def collect(self, *, finished: bool) -> None:
        """Take in what the workers of this epoch wrote. ``finished``: no worker was lost."""
        for path in sorted(self._folder.glob("journal-*.json")):
            self._add(json.loads(path.read_text()))
            path.unlink()
        for path in sorted(self._folder.glob("journal-*.jsonl")):
            self.violations += [self._placed(json.loads(line)) for line in path.read_text().splitlines() if line]
            path.unlink()
        for path in sorted(self._folder.glob("stderr-*")):
            self._listen(path)
        assert self._epoch is not None
        if missing := self.arrivals.end_epoch(self._epoch, finished=finished):
            self.violation("steps not reached", f"no call came to: {', '.join(missing)}")

    def line(self) -> str:
        calls, verified = sum(self.calls.values()), self.counts["verified bytes"]
        for path in self._folder.glob("journal-*.json"):
            now = json.loads(path.read_text())
            calls += sum(now["calls"].values())
            verified += now["counts"].get("verified bytes", 0)
        return (
            f"{time.monotonic() - self._start:5.0f} s: {self.counts['epochs']} epochs, {calls:,} calls, "
            f"{verified / 1e9:.2f} GB verified, {sum(self.faults.values())} faults, {len(self.violations)} violations"
        )

    @property
    def failed(self) -> bool:
        """True when something was as it must never be, or nothing was done at all."""
        return bool(self.violations) or not self.counts["verified bytes"]

    def as_dict(self) -> dict[str, Any]:
        return {
            "calls": dict(self.calls),
            "counts": dict(self.counts),
            "faults": dict(self.faults),
            "arrivals": self.arrivals.as_dict(),
            "worst_lateness_seconds": self.worst,
            "overrun_seconds": overruns(self.overruns),
            "end_after_interrupt_seconds": self.slowest,
            "cells": self.cells.as_dict(),
            "recovery_seconds": self.recoveries.as_dict(),
            "growth_per_hour": self.growth.as_dict(),
            "violations": self.violations,
        }

    def table(self) -> str:
        kinds = sorted({call.split("|")[0] for call in self.calls})
        lines = [f"{'operation':<26}{'calls':>10}{'ok':>10}{'errors':>10}"]
        for kind in kinds:
            results = {call.split("|")[1]: count for call, count in self.calls.items() if call.split("|")[0] == kind}
            good = results.get("ok", 0)
            lines.append(f"{kind:<26}{sum(results.values()):>10,}{good:>10,}{sum(results.values()) - good:>10,}")
        errors: Counter[str] = Counter()
        for call, count in self.calls.items():
            errors[call.split("|")[1]] += count
        good = errors.pop("ok", 0)
        total = good + sum(errors.values())
        lines += [f"{'all':<26}{total:>10,}{good:>10,}{total - good:>10,}", "", f"{'errors by type':<66}{'calls':>10}"]
        lines += [f"{error:<66}{count:>10,}" for error, count in errors.most_common()]
        lines += ["", f"{'faults':<26}{'number':>10}", *(f"{k:<26}{v:>10,}" for k, v in self.faults.most_common())]
        lines += ["", *self.arrivals.lines(), "", *self.cells.lines(), "", *self.recoveries.lines()]
        lines += ["", *self.growth.lines(), "", *self._judgement()]
        return "\n".join(lines)

    def _judgement(self) -> list[str]:
        found = Counter(violation["what"] for violation in self.violations)
        counts = Counter(self.counts)
        epochs, verified = counts.pop("epochs"), counts.pop("verified bytes", 0)
        seconds = time.monotonic() - self._start
        lines = [f"{'epochs':<26}{epochs:>18,}", f"{'seconds':<26}{seconds:>18,.0f}"]
        lines += [f"{'verified bytes':<26}{verified:>18,}", f"{'latest return, s':<26}{max(self.worst, 0.0):>18.2f}"]
        lines += [f"{f'past the deadline, s, {k}':<26}{v:>18.4f}" for k, v in overruns(self.overruns).items()]
        lines += [f"{'end after interrupt, s':<26}{self.slowest:>18.2f}"]
        lines += [f"{name:<26}{n:>18,}" for name, n in sorted(counts.items()) if not name.startswith("violation")]
        lines += [f"{name:<26}{found[name]:>18,}" for name in VIOLATIONS]
        for number, violation in enumerate(self.violations[:_SHOWN]):
            lines += ["", f"--- violation {number + 1} of {len(self.violations)}: {violation['what']}"]
            lines += [f"{violation['who']}, {violation['epoch']}", violation["text"][:_SHOWN_TEXT].rstrip()]
            lines += ["after", *violation["events"]]
        return lines

    def _add(self, journal: dict[str, Any]) -> None:
        self.calls.update(journal["calls"])
        for name, number in journal["counts"].items():
            if name.startswith("cell|"):
                _, fault, state = name.split("|")
                self.cells.add(fault, (state,), number)
            else:
                self.counts[name] += number
        self.overruns.update(dict(journal["overruns"]))
        self.slowest = max(self.slowest, journal["slowest"])
        self.arrivals.add(journal["arrivals"])
        self.worst = max(self.worst, journal["worst"])

    def _placed(self, violation: dict[str, Any]) -> dict[str, Any]:
        when = violation["at"] - self._epoch_start
        before = [event for event in self._events if float(event.split(" s")[0]) <= when]
        return violation | {"epoch": f"{when:.2f} s into {self._epoch}", "events": before[-_SHOWN_EVENTS:]}

    def _listen(self, path: Path) -> None:
        """What a worker writes to its standard error is a complaint of Python's, or of the C library."""
        text = path.read_text(errors="replace")
        new = text[self._complained.get(path.name, 0) :]
        self._complained[path.name] = len(text)
        if any(word in new for word in _COMPLAINTS):
            self.violation("internal errors", f"{path.name}: {new}")
