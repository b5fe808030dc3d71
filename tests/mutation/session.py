"""What came of a pass over mutants: a file with one line for each stage of each mutant, so that a pass can go on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["KILLED", "STAGES", "SURVIVED", "Session", "compare"]

STAGES: Final = ("unit", "wide", "full")
KILLED, SURVIVED = "killed", "survived"


@dataclass(frozen=True)
class _Row:
    """Numbers of one module."""

    module: str
    mutants: int
    killed: tuple[int, ...]
    survived: int


class Session:
    """Results by mutant and stage, in a file. One thread writes.

    Args:
        path: The file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        #: By key of the mutant, what each stage came to. An empty one: no stage has run yet.
        self.results: dict[str, dict[str, str]] = {}
        self._head: dict[str, object] | None = None
        if path.exists():
            for line in path.read_text().splitlines():
                self._take(json.loads(line))

    def _take(self, entry: dict[str, object]) -> None:
        if "settings" in entry:
            self._head = entry
        elif "mutant" in entry:
            stages = self.results.setdefault(str(entry["mutant"]), {})
            if "stage" in entry:
                stages[str(entry["stage"])] = str(entry["outcome"])

    def begin(self, settings: dict[str, object]) -> None:
        """Begin, or go on with what was begun with the same settings.

        Raises:
            ValueError: The file was made with other settings, or from other code.
        """
        head: dict[str, object] = {"settings": settings}
        if self._head is None:
            self._write(head)
            self._head = head
        elif self._head != head:
            raise ValueError(f"{self._path} was begun with {self._head['settings']}, not {settings}: take another file")

    def choose(self, key: str) -> None:
        """Make a mutant part of the pass, before any stage of it has run."""
        if key not in self.results:
            self.add({"mutant": key})

    def add(self, entry: dict[str, object]) -> None:
        """Store a line."""
        self._take(entry)
        self._write(entry)

    def outcome(self, key: str) -> str | None:
        """Return KILLED or SURVIVED by all stages so far, or None where no stage has run."""
        stages = self.results.get(key, {})
        return KILLED if KILLED in stages.values() else SURVIVED if stages else None

    def table(self) -> str:
        """Return the table of all modules and the list of survivors, both sorted."""
        lines = [f"{'module':<28}{'mutants':>9}{'unit':>7}{'wide':>7}{'full':>7}{'survived':>10}{'not run':>9}"]
        for row in self._rows():
            cells = "".join(f"{number:>7}" for number in row.killed)
            rest = row.mutants - sum(row.killed) - row.survived
            lines.append(f"{row.module:<28}{row.mutants:>9}{cells}{row.survived:>10}{rest:>9}")
        survivors = sorted(key for key in self.results if self.outcome(key) == SURVIVED)
        return "\n".join([*lines, "", f"survived ({len(survivors)}):", *(f"  {key}" for key in survivors)])

    def _rows(self) -> Iterator[_Row]:
        for module in sorted({key.split(":")[0] for key in self.results}):
            keys = [key for key in self.results if key.split(":")[0] == module]
            killed = tuple(sum(self.results[key].get(stage) == KILLED for key in keys) for stage in STAGES)
            yield _Row(module, len(keys), killed, sum(self.outcome(key) == SURVIVED for key in keys))

    def _write(self, entry: dict[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def compare(before: Session, after: Session) -> tuple[list[str], str]:
    """Return the mutants that were killed before and survive after, and a summary in one line."""
    both = [key for key in before.results if before.outcome(key) and after.outcome(key)]
    lost = sorted(key for key in both if (before.outcome(key), after.outcome(key)) == (KILLED, SURVIVED))
    won = sum((before.outcome(key), after.outcome(key)) == (SURVIVED, KILLED) for key in both)
    only = [_only(before, after), _only(after, before)]
    return lost, (
        f"{len(both)} mutants in both: {len(lost)} killed before survive now, {won} the other way; "
        f"{only[0]} only before, {only[1]} only after"
    )


def _only(one: Session, other: Session) -> int:
    keys: Iterable[str] = one.results
    return sum(one.outcome(key) is not None and other.outcome(key) is None for key in keys)
