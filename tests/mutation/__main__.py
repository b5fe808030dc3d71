"""``python -m tests.mutation --session FILE``: see docs/notes/mutation.md."""

import argparse
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
from tests.mutation.mutants import mutants
from tests.mutation.runner import PACKAGE, ROOT, Baseline, Copy, NoMutantError
from tests.mutation.session import KILLED, NO_MUTANT, SURVIVED, Session

_PLAN: Final = Path(__file__).with_name("plan.toml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a pass and print its table; return the exit status."""
    run = argparse.ArgumentParser(prog="python -m tests.mutation", description="Mutation testing.")
    run.add_argument("--session", type=Path, required=True, help="file for the results")
    run.add_argument("--module", action="append", help="only this one of tests/mutation/plan.toml; may be repeated")
    run.add_argument("--sample", type=int, help="so many mutants of each module; all, if left out")
    run.add_argument("--seed", type=int, default=1, help="what the sample is chosen by (1)")
    run.add_argument("--time", type=float, default=float("inf"), help="seconds after which no mutant is begun")
    run.add_argument("--processes", type=int, choices=(1, 2), default=2, help="mutants at a time (2)")
    _Pass(run.parse_args(arguments)).run()
    return 0


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

    def run(self) -> None:
        sources = {module: (ROOT / PACKAGE / module).read_text() for module in self._modules}
        options, operators = self._options, self._plan["operators"]
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
            for stage in ("unit", "wide"):  # first what is cheap, for all: a pass may be ended by its time
                for module in self._modules:
                    self._stage(stage, self._plan["modules"][module][stage], chosen[module])
        _say(self._session.table())

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
            killer = copy.killer(mutant, baseline)
            outcome = SURVIVED if killer is None else KILLED
        except NoMutantError:
            killer, outcome = None, NO_MUTANT
        finally:
            self._copies.put(copy)
        with self._lock:
            self._session.add(mutant.key, stage, outcome, killer=killer, seconds=round(time.monotonic() - since, 1))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
