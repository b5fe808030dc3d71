"""Compare the speed of two builds of llm_datadist, on one machine and in turn.

    python -m benchmarks.compare_builds --before /path/to/checkout [--after CHECKOUT] [--cases 'pull-*' link-shm]
    python -m benchmarks.compare_builds --self

A build is a checkout, or a Python interpreter that has llm_datadist installed. For each case, in each of --pairs pairs,
both builds get new worker processes at once; after one pass that warms them up they are measured in turn, each while
the other is stopped, and the build that begins changes from pair to pair. Every pass moves bytes of its own and every
byte is verified. A pair gives one ratio of speeds, after / before: above 1 the build "after" is faster. The first pair
of each case is dropped.

Printed are the median ratio of each case and its 95 % interval, from order statistics: no distribution is assumed. The
exit status is 1 where an interval lies wholly below 0.95, or where a build fails, and else 0.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from llm_datadist.tools.bench import BenchError
from llm_datadist.tools.bench.cases import Case, Request, cases_of
from llm_datadist.tools.bench.processes import Build, RunningContender
from llm_datadist.tools.bench.progress import steps
from llm_datadist.tools.bench.workload import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SLOWEST", "build_of", "cases", "compare", "interval", "is_slower", "main", "pair_ratio"]

SLOWEST: Final = 0.95
"""An interval wholly below this ratio fails."""
_CONFIDENCE: Final = 0.95
_FEWEST_PAIRS: Final = 6
_KIB: Final = 1 << 10
_SET_BYTES: Final = 32 << 20
_STEPS: Final = 200
#: Of one transfer of everything in each pass, and passes of each build in a pair.
_REPEATS: Final = 10
_TURNS: Final = 5
_TIMEOUT_S: Final = 120.0


def cases(seed: int) -> dict[str, Case]:
    """Return the cases by name: every path of the library, small enough to be quick."""
    found: dict[str, Case] = {}
    for name, request in _requests().items():
        for case in cases_of(replace(request, against=(), set_bytes=_SET_BYTES)):
            if case.busy is None:
                variant = {"pull_cache by key": "-key", "copy_cache": "-cache"}.get(case.call, "")
                workload = msgspec.structs.replace(case.workload, seed=seed)
                found[name + variant] = replace(case, workload=workload)
    return found


def _requests() -> dict[str, Request]:
    found: dict[str, Request] = {}
    for transport in ("shm", "cma", "tcp", "inproc"):
        for size in (4, 64, 1024):
            pull = Request(op=Op.PULL, transport=transport, block_bytes=size * _KIB)
            found[f"pull-{transport}-{size}k"] = pull
        found[f"push-{transport}-64k"] = Request(op=Op.PUSH, transport=transport)
        found[f"latency-{transport}"] = Request(op=Op.LATENCY, transport=transport, blocks=_STEPS)
    found["copy-64k"] = Request(op=Op.COPY)
    found["swap-64k"] = Request(op=Op.SWAP)
    found["plan"] = Request(op=Op.PLAN, blocks=1000)
    found["alloc"] = Request(op=Op.ALLOC)
    for transport in ("shm", "cma", "tcp"):
        found[f"link-{transport}"] = Request(op=Op.LINK, transport=transport)
    return found


def build_of(path: Path) -> Build:
    """Return the build at a path: an interpreter or a checkout.

    A checkout without a ``.venv`` runs under the interpreter of this process.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if not path.is_dir():
        return Build(str(path), environment)
    interpreter = path / ".venv/bin/python"
    if interpreter.exists():
        return Build(str(interpreter), environment)
    return Build(sys.executable, environment | {"PYTHONPATH": str(path / "src")})


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the order statistics around the median that hold it with 95 % confidence.

    The number of ratios below the true median is binomial (n, 1/2): each of the two tails left out has at most 2.5 %.

    Raises:
        ValueError: There are fewer than six ratios, for which no such pair exists.
    """
    count = len(ratios)
    if count < _FEWEST_PAIRS:
        raise ValueError(f"{count} ratios: an interval needs at least {_FEWEST_PAIRS}")
    ordered = sorted(ratios)
    tail, dropped = 0.0, 0
    while (tail := tail + math.comb(count, dropped) / 2**count) <= (1 - _CONFIDENCE) / 2:
        dropped += 1
    return ordered[dropped - 1], ordered[count - dropped]


def is_slower(ratios: Sequence[float]) -> bool:
    """Return True if the whole interval lies below :data:`SLOWEST`."""
    return interval(ratios)[1] < SLOWEST


def pair_ratio(case: Case, builds: tuple[Build, Build], number: int) -> float:
    """Measure one pair; return the speed of the second build in that of the first.

    Raises:
        BenchError: A worker failed, or moved wrong bytes.
    """
    order = (0, 1) if number % 2 == 0 else (1, 0)
    seconds: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as stack:
        # Both are launched before the first is set up: importing takes longer than anything else.
        running = [stack.enter_context(RunningContender(case.contender, _TIMEOUT_S, build)) for build in builds]
        for index in order:
            with running[index].turn():
                running[index].start(case.workload)
        for turn in range(_TURNS + 1):
            for index in order:
                took = _measure(running[index], case, seed=number * (_TURNS + 1) + turn + 1)
                if turn:
                    seconds[index].append(took)
    before, after = map(statistics.median, seconds)
    return before / after


def _measure(running: RunningContender, case: Case, seed: int) -> float:
    """Run one pass and verify its bytes; return its median seconds."""
    what, count = ("sample", case.samples) if case.samples else ("timed", _REPEATS)
    with running.turn():
        running.prepare(seed)
        seconds, _ = running.run(what, count)
        running.verify(seed)
    return statistics.median(seconds)


def compare(case: Case, builds: tuple[Build, Build], pairs: int) -> list[float]:
    """Return the ratios of so many pairs, after one that is dropped. Raises as :func:`pair_ratio`."""
    return [pair_ratio(case, builds, number) for number in range(pairs + 1)][1:]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="checkout or interpreter to compare with")
    parser.add_argument("--after", type=Path, default=Path(sys.executable), help="(the interpreter that runs this)")
    parser.add_argument("--self", action="store_true", help="compare --after with itself")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN", help="names of cases, or patterns")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the blocks")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and exit")
    options = parser.parse_args(arguments)
    if not options.list and (options.before is None) == (not options.self):
        parser.error("give either --before or --self")
    if options.pairs < _FEWEST_PAIRS:
        parser.error(f"--pairs: {options.pairs} is below {_FEWEST_PAIRS}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Compare, print, and return the exit status."""
    options = _options(arguments)
    chosen = {
        name: case
        for name, case in cases(options.seed).items()
        if any(fnmatchcase(name, pattern) for pattern in options.cases)
    }
    if options.list or not chosen:
        print("\n".join(chosen) or f"no case is called {' or '.join(options.cases)}; see --list")
        return 0 if chosen else 2
    after = build_of(options.after)
    builds = (after if options.self else build_of(options.before), after)
    print(f"speed of {builds[1].python} in that of {builds[0].python}, {options.pairs} pairs a case, bytes verified")
    began, bad = time.monotonic(), 0
    for name, case in steps(chosen.items(), itemgetter(0), "cases"):
        try:
            ratios = compare(case, builds, options.pairs)
        except (BenchError, OSError) as error:
            bad += 1
            print(f"{name:<28} FAILED: {error}", flush=True)
            continue
        low, high = interval(ratios)
        slower = is_slower(ratios)
        bad += slower
        verdict = "  SLOWER" if slower else ""
        print(f"{name:<28} {statistics.median(ratios):5.3f}  [{low:5.3f}, {high:5.3f}]{verdict}", flush=True)
    print(f"{len(chosen)} cases, {bad} slower or failed, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
