"""What came of a pass over mutants: a file with one line for each stage of each mutant, so that a pass can go on."""

import json
from pathlib import Path
from typing import Final

STAGES: Final = ("unit", "wide")
KILLED, SURVIVED = "killed", "survived"
#: C++ that does not compile.
NO_MUTANT: Final = "no mutant"


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
        """Return KILLED or SURVIVED by all stages so far, NO_MUTANT, or None where no stage has run."""
        outcomes = set(self.results.get(key, {}).values())
        return next((each for each in (KILLED, NO_MUTANT, SURVIVED) if each in outcomes), None)

    def table(self) -> str:
        """Return the table of all modules and the list of survivors, both sorted."""
        lines = [f"{'module':<28}{'mutants':>9}{'unit':>7}{'wide':>7}{'survived':>10}{'not run':>9}"]
        for module in sorted({key.split(":")[0] for key in self.results}):
            keys = [key for key in self.results if key.split(":")[0] == module and self.outcome(key) != NO_MUTANT]
            killed = [sum(self.results[key].get(stage) == KILLED for key in keys) for stage in STAGES]
            survived = sum(self.outcome(key) == SURVIVED for key in keys)
            cells = "".join(f"{number:>7}" for number in killed)
            lines.append(f"{module:<28}{len(keys):>9}{cells}{survived:>10}{len(keys) - sum(killed) - survived:>9}")
        survivors = sorted(key for key in self.results if self.outcome(key) == SURVIVED)
        return "\n".join([*lines, "", f"survived ({len(survivors)}):", *(f"  {key}" for key in survivors)])

    def _write(self, entry: dict[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
