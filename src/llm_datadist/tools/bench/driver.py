"""Driver of cases: all contenders of a case in turns, pass after pass, every byte verified. One thread.

A contender that fails loses only its own figures. If it is this library's, its case is left out.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from llm_datadist._memory.host import available_memory
from llm_datadist.tools.bench import BenchError, contenders
from llm_datadist.tools.bench.cases import Case, size_text
from llm_datadist.tools.bench.contenders.base import Role
from llm_datadist.tools.bench.processes import Build, RunningContender
from llm_datadist.tools.bench.rows import Measured, Row, make_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from llm_datadist.tools.bench.report import BenchReporter
    from llm_datadist.tools.bench.workload import BenchWorkload

#: Usable part of the available memory; with more the machine might swap or kill.
_SHARE: Final = 0.9
#: Workload of the trial before any measurement.
_TINY_BLOCKS: Final = 2
_TINY_BYTES: Final = 4096


@dataclass(slots=True)
class Results:
    """Rows, and a line for each failure during the run."""

    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def prepare(cases: Iterable[Case], tell: BenchReporter, timeout_s: float) -> list[Case]:
    """Return the cases that can run, and say why others, or some contenders, are left out.

    A contender may decline the workload, or fail to connect; a case may exceed the memory.
    """
    check = _Check(tell, timeout_s)
    return [possible for each in cases if (possible := check.case(each)) is not None]


class _Check:
    def __init__(self, tell: BenchReporter, timeout_s: float) -> None:
        self._tell = tell
        self._timeout_s = timeout_s
        self._tried: dict[tuple[str, str], str | None] = {}
        self._said: set[str] = set()
        self._memory, self._bound = available_memory()
        self._free_on_gpu = sys.maxsize  # beside the contenders tried

    def case(self, case: Case) -> Case | None:
        """Return the case as it can run, or None."""
        possible = self._without_unable(case, contenders.why_not)
        if possible is None or not self._fits(possible):
            return None
        possible = self._without_unable(possible, self._try)
        return possible if possible is not None and self._fits(possible, on_gpu=True) else None

    def _without_unable(self, case: Case, why_not: Callable[[str, BenchWorkload], str | None]) -> Case | None:
        """Return the case without contenders that have a reason; None without this library's."""
        for contender in case.contenders:
            if (reason := why_not(contender, case.workload)) is not None:
                self._say(f"{contender}: {reason}")
                ours = contender == case.contender
                self._tell.left_out.setdefault(reason, {})[case.what if ours else contender] = None
                if ours:
                    self._say(f"left out: {case.title}")
                    return None
                case = case.without(contender)
        return case

    def _try(self, contender: str, workload: BenchWorkload) -> str | None:
        """Start a contender once on two small blocks; return the reason of a failure, or None."""
        key = contender, workload.memory
        if key not in self._tried:
            self._tell.say(f"trying {contender}")
            tiny = msgspec.structs.replace(
                workload,
                blocks=min(workload.blocks, _TINY_BLOCKS),
                block_bytes=min(workload.block_bytes, _TINY_BYTES),
                tensors=1,
            )
            try:
                with RunningContender(contender, self._timeout_s) as running:
                    running.start(tiny)
                    running.prepare(0)
                    if contenders.find(contender).footprint_on_gpu(tiny):
                        free: int = running.ask(running.processes[-1], "free_on_gpu")
                        self._free_on_gpu = min(self._free_on_gpu, free)
                self._tried[key] = None
            except (BenchError, OSError) as error:
                self._tried[key] = str(error)
        return self._tried[key]

    def _fits(self, case: Case, *, on_gpu: bool = False) -> bool:
        found = [contenders.find(contender) for contender in case.contenders]
        of_each = (each.footprint_on_gpu if on_gpu else each.footprint for each in found)
        needed = sum(footprint(case.workload) for footprint in of_each)
        memory, bound = (self._free_on_gpu, "in the GPU") if on_gpu else (self._memory, self._bound)
        fits = needed <= memory * _SHARE
        if not fits:
            why = (
                f"{', '.join(case.contenders)} together need {size_text(needed)}, and "
                f"{memory / 2**30:.1f} GiB are available ({bound}); "
                "fewer --blocks, or fewer contenders --against"
            )
            self._say(f"left out: {case.title}: {why}")
            self._tell.left_out.setdefault(why, {})[case.what] = None
        return fits

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._tell.say(text)


def run(cases: Sequence[Case], tell: BenchReporter, timeout_s: float, build: Build | None = None) -> Results:
    """Run the cases in order, with workers of ``build``."""
    results = Results()
    for case in cases:
        try:
            results.rows += _CaseRun(case, tell, timeout_s, results.failures, build).run()
        except (BenchError, OSError) as error:
            results.failures.append(f"{case.title}: {error}")
            tell.say(results.failures[-1])
    return results


@dataclass(slots=True)
class _CaseRun:
    case: Case
    tell: BenchReporter
    timeout_s: float
    failures: list[str]
    build: Build | None
    measured: dict[str, Measured] = field(default_factory=dict)
    running: dict[str, RunningContender] = field(default_factory=dict)

    def run(self) -> list[Row]:
        with ExitStack() as stack:
            # All processes start before the first setup: imports take longest.
            for contender in self.case.contenders:
                with self._guarded(contender):
                    started = stack.enter_context(RunningContender(contender, self.timeout_s, self.build))
                    self.running[contender], self.measured[contender] = started, Measured()
            for contender in list(self.running):
                with self._guarded(contender):
                    self._start(contender)
            for number in range(self.case.passes + 1):
                for contender in list(self.running):
                    self.tell.progress(self.case, contender, number, self.case.passes + 1)
                    with self._guarded(contender):
                        self._pass(contender, number)
            transport = str(self.running[self.case.contender].facts.get("transport", self.case.transport))
        limit = self.measured.get(self.case.limit or "")
        peers = {name: self.measured[name] for name in self.case.peers if name in self.measured}
        return make_rows(self.case, transport, self.measured[self.case.contender], limit, peers)

    @contextmanager
    def _guarded(self, contender: str) -> Iterator[None]:
        """If the block fails, drop the contender, unless it is this library's."""
        try:
            yield
        except (BenchError, OSError) as error:
            if contender == self.case.contender:
                raise
            self.failures.append(f"{self.case.title}: {error}")
            self.tell.say(self.failures[-1])
            self.measured.pop(contender, None)
            if (lost := self.running.pop(contender, None)) is not None:
                lost.kill()

    def _start(self, contender: str) -> None:
        running = self.running[contender]
        with running.turn():
            running.start(self.case.workload)
            self.measured[contender].way = running.facts.get("way", "")
            if contender == self.case.contender and self.case.busy:
                side = running.processes[0 if self.case.busy is Role.SOURCE else -1]
                running.ask(side, "busy", on=True)

    def _pass(self, contender: str, number: int) -> None:
        running = self.running[contender]
        # Each pass moves other bytes.
        seed = number + 1
        with running.turn():
            running.prepare(seed)
            if self.case.samples:
                seconds, cpu_seconds = running.run("sample", self.case.samples)
            else:
                seconds, cpu_seconds = running.run("timed", self.case.repeats if number else 1)
            running.verify(seed)
        self.measured[contender].add(number, seconds, cpu_seconds)
