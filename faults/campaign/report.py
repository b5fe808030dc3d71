"""What came of a campaign: the counts of all workers together, the table, and the first violations in detail."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from faults.campaign.schedule import Epoch, Event
from faults.gates import STEPS

#: What makes a campaign fail, each with its line in the table.
VIOLATIONS: Final = (
    *("wrong bytes", "false mismatches", "hangs", "leaks", "untyped errors"),
    *("internal errors", "keys", "not healed", "crashes", "steps not reached"),
)
_SHOWN: Final = 8
_SHOWN_EVENTS: Final = 25
_SHOWN_TEXT: Final = 3000
_COMPLAINTS: Final = ("Traceback", "Exception ignored", "Warning", "Fatal Python error", "terminate called")
_EVERY_KIND: Final = {
    *("hold", "link", "ask", "asked", "target asked", "target answered"),
    *("answer", "resolved", "plan", "before copy", "after copy"),
}
_PINNED: Final = {"release", "released", "target release", "target released"}
_PUSHED: Final = {"before write", "after write", "consumed", "target consumed"}


def expected(epoch: Epoch) -> set[str]:
    """Return the steps to which every finished epoch comes where the transport is forced.

    A step that no call comes to is tested no more, whatever the gates of a campaign are set to.
    """
    if epoch.transport not in ("shm", "cma", "tcp"):
        return set()
    return _EVERY_KIND | (_PUSHED if epoch.rca else _PINNED)


def _grid(head: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[object]]]) -> Iterator[str]:
    yield f"{head:<26}" + "".join(f"{column:>14}" for column in columns)
    for name, cells in rows:
        yield f"{name:<26}" + "".join(
            f"{cell:>14,.3f}" if isinstance(cell, float) else f"{cell:>14,}" for cell in cells
        )


def _by_first(counts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for (first, second), number in sorted(counts.items()):
        found[first][second] = number
    return found


class Report:
    """Reads what the workers wrote. The supervisor's thread only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start = self._epoch_start = time.monotonic()
        self.calls: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        #: By step and transport of the link; a step before there is a link has none.
        self.arrivals: Counter[tuple[str, str]] = Counter()
        self.violations: list[dict[str, Any]] = []
        self.worst = self.slowest = 0.0
        self._epoch: Epoch | None = None
        self._events: list[str] = []
        self._arrived: set[str] = set()  # in this epoch
        self._complained: dict[str, int] = {}

    def begin(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._epoch_start = time.monotonic()
        self._events.clear()
        self._arrived.clear()
        self.counts["epochs"] += 1

    def happened(self, event: Event) -> None:
        """A fault has been brought about."""
        self.faults[event.what] += 1
        self.phase(str(event))

    def phase(self, what: str) -> None:
        self._events.append(f"{time.monotonic() - self._epoch_start:6.2f} s: {what}")

    def violation(self, what: str, text: str) -> None:
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
            # What a worker writes to its standard error is a complaint of Python's, or of the C library.
            text = path.read_text(errors="replace")
            new = text[self._complained.get(path.name, 0) :]
            self._complained[path.name] = len(text)
            if any(word in new for word in _COMPLAINTS):
                self.violation("internal errors", f"{path.name}: {new}")
        assert self._epoch is not None
        if finished and (missing := expected(self._epoch) - self._arrived):
            self.violation("steps not reached", f"no call came to: {', '.join(sorted(missing))}")

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
            "arrivals": _by_first({(transport, step): n for (step, transport), n in self.arrivals.items()}),
            "worst_lateness_seconds": self.worst,
            "end_after_interrupt_seconds": self.slowest,
            "violations": self.violations,
        }

    def table(self) -> str:
        kinds: Counter[str] = Counter()
        good: Counter[str] = Counter()
        errors: Counter[str] = Counter()
        for call, count in self.calls.items():
            for kind in (call.split("|")[0], "all"):
                kinds[kind] += count
                good[kind] += count if call.endswith("|ok") else 0
            errors[call.split("|")[1]] += count
        del errors["ok"]
        names = [*sorted(kinds.keys() - {"all"}), "all"]
        operations = [(kind, (kinds[kind], good[kind], kinds[kind] - good[kind])) for kind in names]
        steps = _by_first(self.arrivals)
        transports = sorted({transport for _, transport in self.arrivals})
        arrivals = [(step, [steps[step].get(each, 0) for each in transports]) for step in STEPS if step in steps]
        parts = [
            _grid("operation", ("calls", "ok", "errors"), operations),
            [f"{'errors by type':<66}{'calls':>10}", *(f"{k:<66}{v:>10,}" for k, v in errors.most_common())],
            _grid("faults", ("number",), [(name, (count,)) for name, count in self.faults.most_common()]),
            _grid("arrivals at steps", [each or "no link" for each in transports], arrivals),
            self._judgement(),
        ]
        return "\n\n".join("\n".join(part) for part in parts)

    def _judgement(self) -> Iterator[str]:
        found = Counter(violation["what"] for violation in self.violations)
        rows: dict[str, object] = {
            "seconds": round(time.monotonic() - self._start),
            "verified bytes": 0,
            "latest return, s": max(self.worst, 0.0),
            "end after interrupt, s": self.slowest,
            **{name: n for name, n in sorted(self.counts.items()) if not name.startswith("violation")},
            **{name: found[name] for name in VIOLATIONS},
        }
        yield from _grid("", (), [(name, (value,)) for name, value in rows.items()])
        for number, violation in enumerate(self.violations[:_SHOWN], 1):
            yield f"\n--- violation {number} of {len(self.violations)}: {violation['what']}"
            yield f"{violation['who']}, {violation['epoch']}\n{violation['text'][:_SHOWN_TEXT].rstrip()}\nafter"
            yield from violation["events"]

    def _add(self, journal: dict[str, Any]) -> None:
        self.calls.update(journal["calls"])
        self.counts.update(journal["counts"])
        for key, number in journal["arrivals"].items():
            step, _, transport = key.partition(", ")
            self.arrivals[step, transport] += number
            self._arrived.add(step)
        self.slowest = max(self.slowest, journal["slowest"])
        self.worst = max(self.worst, journal["worst"])

    def _placed(self, violation: dict[str, Any]) -> dict[str, Any]:
        when = violation["at"] - self._epoch_start
        before = [event for event in self._events if float(event.split(" s")[0]) <= when]
        return violation | {"epoch": f"{when:.2f} s into {self._epoch}", "events": before[-_SHOWN_EVENTS:]}
