"""Output of the bench: lines and a bar during the run, tables afterwards. Needs rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from llm_datadist._tables import show_table
from llm_datadist.tools.bench.cases import Case, size_text
from llm_datadist.tools.bench.progress import BenchProgress
from llm_datadist.tools.bench.workload import MOVES, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.tools.bench.rows import Row
    from llm_datadist.tools.bench.suite import Floor


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
        cells = _rates if op in MOVES else _times
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


def _rates(row: Row) -> dict[str, str]:
    return {
        "call": row.call,
        "over": row.transport,
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


def _times(row: Row) -> dict[str, str]:
    return {
        "call": row.call,
        "over": row.transport,
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


def _us(seconds: float | None) -> str:
    return "" if seconds is None else _number(seconds * 1e6)
