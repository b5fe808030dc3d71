"""``python -m tests.mutation run --session FILE`` and ``python -m tests.mutation compare BEFORE AFTER``.

See docs/notes/mutation.md.
"""

import argparse
import hashlib
import queue
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tests.mutation import Mutant, headers
from tests.mutation.runner import PACKAGE, ROOT, Baseline, Copy, NoMutantError
from tests.mutation.session import KILLED, NO_MUTANT, SURVIVED, Session, compare

_PLAN: Final = Path(__file__).with_name("plan.toml")
_FULL: Final = ("tests",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a pass or compare two; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="Mutation testing.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="make mutants and run tests; goes on where a session file is there")
    run.add_argument("--session", type=Path, required=True, help="file for the results")
    run.add_argument("--module", action="append", help="only this one of tests/mutation/plan.toml; may be repeated")
    run.add_argument("--sample", type=int, help="so many mutants of each module; all, if left out")
    run.add_argument("--seed", type=int, default=1, help="what the sample is chosen by (1)")
    run.add_argument("--time", type=float, default=float("inf"), help="seconds after which no mutant is begun")
    run.add_argument("--before", type=Path, help="a session: try what it killed, if the killer's file has changed")
    run.add_argument("--processes", type=int, choices=(1, 2), default=2, help="mutants at a time (2)")
    run.add_argument("--full", action="store_true", help="then all tests for those that survive")
    table = commands.add_parser("table", help="print the table of a session")
    table.add_argument("session", type=Path)
    both = commands.add_parser("compare", help="1 if a mutant that was killed before survives after")
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    match options.command:
        case "run":
            return _Pass(options).run()
        case "table":
            _say(Session(options.session).table())
            return 0
        case _:
            lost, summary = compare(Session(options.before), Session(options.after))
            _say("\n".join([summary, *(f"  {key}" for key in lost)]))
            return int(bool(lost))


class _Pass:
    """One pass over modules. The main thread hands out mutants; each worker thread has a copy of the tree."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._plan: dict[str, Any] = tomllib.loads(_PLAN.read_text())
        self._modules: list[str] = options.module or list(self._plan["modules"])
        self._session = Session(options.session)
        self._lock = threading.Lock()
        self._end = time.monotonic() + options.time
        self._copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def run(self) -> int:
        from tests.mutation.mutants import mutants  # compare and table need no cosmic-ray

        sources = {module: (ROOT / PACKAGE / module).read_text() for module in self._modules}
        options, operators = self._options, self._plan["operators"]
        digests = {module: hashlib.sha256(text.encode()).hexdigest()[:12] for module, text in sources.items()}
        self._session.begin({"sample": options.sample, "seed": options.seed, "modules": digests})
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            for number in range(options.processes):
                self._copies.put(Copy(Path(folder) / str(number)))
            chosen = {
                module: list(
                    headers.mutants(module, source, options.sample, options.seed)
                    if module.endswith(".hpp")
                    else mutants(module, source, operators, options.sample, options.seed)
                )
                for module, source in sources.items()
            }
            for mutant in (each for of_module in chosen.values() for each in of_module):
                self._session.choose(mutant.key)
            if options.before is not None:
                self._take_over(Session(options.before))
            for stage in ("unit", "wide"):  # first what is cheap, for all: a pass may be ended by its time
                for module in self._modules:
                    self._stage(stage, self._plan["modules"][module][stage], chosen[module])
            if options.full:
                self._stage("full", _FULL, [each for of_module in chosen.values() for each in of_module])
        _say(self._session.table())
        return 0

    def _take_over(self, before: Session) -> None:
        """Take over what an earlier pass found: survivors, and mutants whose killer's file is what it was."""
        for key, stages in self._session.results.items():
            test, digest = before.killers.get(key, ("", ""))
            killed = before.outcome(key) == KILLED
            if not stages and before.outcome(key) is not None and (not killed or digest == _digest(test)):
                for stage, outcome in before.results[key].items():
                    entry: dict[str, object] = {"mutant": key, "stage": stage, "outcome": outcome}
                    self._session.add(entry | ({"killer": test, "digest": digest} if outcome == KILLED else {}))

    def _stage(self, stage: str, tests: Sequence[str], chosen: list[Mutant]) -> None:
        """Run a stage for the mutants that no test has killed so far."""
        results = self._session.results
        ended = {KILLED, NO_MUTANT}
        waiting = [m for m in chosen if ended.isdisjoint(results[m.key].values()) and stage not in results[m.key]]
        if not waiting or time.monotonic() > self._end:
            return
        copy = self._copies.get()
        baseline = copy.baseline(tests)
        self._copies.put(copy)
        left_out = f"; left out, they fail anyway: {', '.join(baseline.failing)}" if baseline.failing else ""
        _say(f"{stage}: {len(waiting)} mutants, {' '.join(tests)} ({baseline.seconds:.1f} s){left_out}")
        with ThreadPoolExecutor(self._options.processes) as workers:
            for _ in workers.map(lambda mutant: self._try(stage, mutant, baseline), waiting):
                pass

    def _try(self, stage: str, mutant: Mutant, baseline: Baseline) -> None:
        if time.monotonic() > self._end:
            return
        copy, since = self._copies.get(), time.monotonic()
        try:
            killer: str | None = copy.killer(mutant, baseline)
            if killer is None and self._options.before is not None:
                killer = copy.killer(mutant, baseline)  # a mutant counts as lost only if it survives twice
            entry = {"outcome": SURVIVED}
            if killer is not None:
                entry = {"outcome": KILLED, "killer": killer, "digest": _digest(killer)}
        except NoMutantError:
            entry = {"outcome": NO_MUTANT}
        finally:
            self._copies.put(copy)
        with self._lock:
            seconds = round(time.monotonic() - since, 1)
            self._session.add({"mutant": mutant.key, "stage": stage, "seconds": seconds} | entry)


def _digest(test: str) -> str:
    """Return the digest of a test's file, as far as it is there."""
    path = ROOT / test.partition("::")[0]
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ""


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
