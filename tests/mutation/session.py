"""What came of a pass over mutants, also in a file: one line for each stage of each mutant."""

import json
from pathlib import Path
from typing import Final

STAGES: Final = ("unit", "wide")
KILLED, SURVIVED = "killed", "survived"
#: C++ that does not compile.
NO_MUTANT: Final = "no mutant"


class Session:
    """Results by mutant and stage. One thread writes.

    Args:
        path: The file, begun anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_text("")
        #: By key of the mutant, what each stage came to. An empty one: no stage has run yet.
        self.results: dict[str, dict[str, str]] = {}

    def choose(self, key: str) -> None:
        """Make a mutant part of the pass, before any stage of it has run."""
        self.results[key] = {}

    def add(self, key: str, stage: str, outcome: str, **more: object) -> None:
        """Store what a stage came to."""
        self.results[key][stage] = outcome
        with self._path.open("a") as file:
            file.write(json.dumps({"mutant": key, "stage": stage, "outcome": outcome} | more) + "\n")

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
