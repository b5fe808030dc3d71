"""Output of the bench: lines and a bar during the run, tables and a line for reports afterwards. Needs rich."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

import llm_datadist
from llm_datadist._native import usable_cpus
from llm_datadist._tables import show_table
from llm_datadist.tools.bench.cases import Case, size_text
from llm_datadist.tools.bench.progress import BenchProgress
from llm_datadist.tools.bench.suite import counts_calls
from llm_datadist.tools.bench.workload import MOVES, BenchMemory, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from llm_datadist.tools.bench.rows import Row
    from llm_datadist.tools.bench.suite import Floor

_TYPICAL: Final = 64 << 10  # bytes of a block


class BenchReporter(BenchProgress):
    """Progress on standard error: a bar on a terminal, else a line for each case. A context manager."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, "cases")
        self._cases: list[Case] = []
        self.left_out: dict[str, dict[str, None]] = {}  # by the reason: contenders and cases

    def take(self, cases: Sequence[Case]) -> None:
        """Set the cases that will run."""
        self._cases = list(cases)
        self.begin(len(cases))

    def progress(self, case: Case, contender: str, done: int, total: int) -> None:
        """Move the bar by the finished part of the passes."""
        number = self._cases.index(case)
        self.show(number + done / total, f"{case.title}: {contender}")
        if not self.live and done == 0 and contender == case.contender:
            self.say(f"{number + 1} of {len(self._cases)}: {case.title}")


def show_rows(rows: Sequence[Row], stream: TextIO) -> None:
    """Print one table for each op."""
    for op in dict.fromkeys(row.op for row in rows):
        cells = _rate_cells if op in MOVES else _time_cells
        show_table(op, [cells(row) for row in rows if row.op == op], stream)


def show_floors(floors: Sequence[Floor], stream: TextIO) -> None:
    """Print the floors and their verdicts."""
    rows = [
        {
            "what": floor.what,
            "measured": "not measured" if floor.measured is None else f"{floor.measured:.2f} {floor.unit}",
            "floor": f"at {'most' if floor.at_most else 'least'} {floor.wanted:g} {floor.unit}",
            "verdict": "" if floor.met is None else ("met" if floor.met else "NOT met"),
            "the limit itself": "" if floor.limit is None else f"{floor.limit:.2f} {floor.unit}",
        }
        for floor in floors
    ]
    show_table("floors", rows, stream)


def _rate_cells(row: Row) -> dict[str, str]:
    return {
        "call": row.call,
        "over": row.over,
        "memory": row.memory,
        "blocks": _work(row),
        "first GB/s": _number(row.bytes / row.first_seconds / 1e9),
        "GB/s": _number(row.gb_per_s),
        "spread GB/s": " to ".join(_number(row.bytes / each / 1e9) for each in (row.seconds_max, row.seconds_min)),
        "limit": row.limit or "",
        "limit GB/s": _number(row.limit_gb_per_s),
        "x limit": _number(row.ratio_to_limit),
        "peer": row.peer or "",
        "peer GB/s": _number(row.peer_gb_per_s),
        "x peer": _number(row.ratio_to_peer),
        "CPU s/GiB": _number(row.cpu_seconds_per_gib),
    }


def _time_cells(row: Row) -> dict[str, str]:
    return {
        "call": row.call,
        "over": row.over,
        "blocks": _work(row),
        "busy": row.busy or "",
        "first us": _us(row.first_seconds),
        "p50 us": _us(row.seconds_median),
        "p90 us": _us(row.seconds_p90),
        "p99 us": _us(row.seconds_p99),
        "a tensor us": _us(row.seconds_median / row.tensors) if row.op == Op.ALLOC else "",
        "limit": row.limit or "",
        "limit p50 us": _us(row.limit_seconds_median),
        "x limit": _number(row.ratio_to_limit),
        "peer": row.peer or "",
        "peer p50 us": _us(row.peer_seconds_median),
        "x peer": _number(row.ratio_to_peer),
    }


def _work(row: Row) -> str:
    return f"{row.blocks} x {size_text(row.block_bytes)} x {row.tensors}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _us(seconds: float | None, text: Callable[[float], str] = _number) -> str:
    return "" if seconds is None else text(seconds * 1e6)


def show_summary(rows: Sequence[Row], floors: Sequence[Floor], stream: TextIO) -> None:
    """Print tables of rates and times, at most 80 columns wide, and a line for reports."""
    show_table("rates", list(_rates(rows)), stream)
    show_table("times", list(_times(rows)), stream)
    print(f"\nMedians. CPU: seconds of all processes, blocks of {size_text(_TYPICAL)}. For a report:", file=stream)
    print(f"\n{report_line(rows, floors)}", file=stream)


def report_line(rows: Sequence[Row], floors: Sequence[Floor]) -> str:
    """Return what was measured, where, and the main figures, in one line."""
    system = os.uname()
    parts = [
        f"open-datadist {llm_datadist.__version__}, Python {platform.python_version()}, {system.sysname} "
        f"{system.release} {system.machine}, {usable_cpus()} CPUs{_model()}, {time.strftime('%Y-%m-%d')}"
    ]
    for call, transport, found in _groups(rows):
        typical = [row for row in found if row.block_bytes == _TYPICAL]
        if typical and found[0].op == Op.PULL:
            ratios = [(row.peer, row.ratio_to_peer) for row in typical]
            beside = [(typical[0].limit_name, typical[0].ratio_to_limit), *ratios]
            times = ", ".join(f"{ratio:.2f} x {name}" for name, ratio in beside if ratio is not None)
            parts.append(f"{call} over {transport} {typical[0].gb_per_s:.2f} GB/s{f' ({times})' if times else ''}")
    parts += [f"{cells['us']} p50 {cells['p50']} us, p99 {cells['p99']} us" for cells in _times(rows)]
    measured = [floor.met for floor in floors if floor.met is not None]
    return "; ".join([*parts, f"{sum(measured)} of {len(measured)} floors met"])


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield call, transport and rows of the calls that move sets of blocks, of one kind of memory each."""
    moves = [row for row in rows if row.op in MOVES and row.memory != BenchMemory.GPU and not counts_calls(row)]
    memory: dict[tuple[str, str], str] = {}
    for row in moves:
        memory.setdefault((row.call, row.over), row.memory)
    for (call, transport), kind in memory.items():
        wanted = call, transport, kind
        yield call, transport, [row for row in moves if (row.call, row.over, row.memory) == wanted]


def _rates(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield GB/s by size of a block, of each call, then of its limit and its peers."""
    for call, transport, found in _groups(rows):
        over = "" if transport == "local" else f" over {transport}"
        yield _rate(f"{call}{over}", {row.block_bytes: (row.gb_per_s, row.cpu_seconds_per_gib) for row in found})
        if limit := found[0].limit_name:
            of = {row.block_bytes: (row.limit_gb_per_s, row.limit_cpu_seconds_per_gib) for row in found}
            yield _rate(f"  {limit}", of)
        for peer in dict.fromkeys(row.peer for row in found if row.peer):
            mine = [row for row in found if row.peer == peer]
            yield _rate(
                f"  {peer}", {row.block_bytes: (row.peer_gb_per_s, row.peer_cpu_seconds_per_gib) for row in mine}
            )


def _rate(name: str, figures: Mapping[int, tuple[float | None, float | None]]) -> dict[str, str]:
    sizes = {size_text(size): _short(rate) for size, (rate, _) in sorted(figures.items())}
    return {"GB/s": name, **sizes, "CPU s/GiB": _short(figures.get(_TYPICAL, (None, None))[1])}


def _times(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield microseconds of one call on one block, beside the limit and the first peer."""
    seen = set()
    for row in rows:
        if row.op == Op.LATENCY and row.busy is None and (row.call, row.over) not in seen:
            seen.add((row.call, row.over))
            yield {
                "us": f"{row.call} over {row.over}",
                "p50": _us(row.seconds_median, _short),
                "p99": _us(row.seconds_p99, _short),
                "limit p50": _us(row.limit_seconds_median, _short),
                "peer": row.peer or "",
                "peer p50": _us(row.peer_seconds_median, _short),
            }


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def _model() -> str:
    """Return the name of the CPU, if the kernel knows it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f" ({line.partition(': ')[2]})"
    return ""
