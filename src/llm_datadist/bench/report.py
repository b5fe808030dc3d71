"""Output of the bench: lines and a bar while it runs, tables at the end. Needs rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console
from rich.table import Table

from llm_datadist.bench.cases import Case, size_text
from llm_datadist.bench.progress import Progress
from llm_datadist.bench.workload import MOVES, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.bench.rows import Row
    from llm_datadist.bench.suite import Floor

# A table that is redirected into a file has no terminal to tell how wide it may be.
_WIDTH: Final = 150


class Reporter(Progress):
    """Progress on standard error: a bar on a terminal, else a line for each case. A context manager."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, "cases")
        self._cases: list[Case] = []

    def take(self, cases: Sequence[Case]) -> None:
        """Take note of the cases that will run."""
        self._cases = list(cases)
        self.begin(len(cases))

    def progress(self, case: Case, side: str, done: int, total: int) -> None:
        """Move the bar by the part of the passes that is done."""
        number = self._cases.index(case)
        self.show(number + done / total, f"{case.title}: {side}")
        if not self.live and done == 0 and side == case.side:
            self.say(f"{number + 1} of {len(self._cases)}: {case.title}")


def show_rows(rows: Sequence[Row], stream: TextIO) -> None:
    """Print one table for each op."""
    console = _console(stream)
    for op in dict.fromkeys(row.op for row in rows):
        group = [row for row in rows if row.op == op]
        console.print(_rates(group, op) if op in MOVES else _times(group, op))


def show_floors(floors: Sequence[Floor], stream: TextIO) -> None:
    """Print the floors, and which of them are met."""
    table = _table("floors", ("what", "measured", "floor", "", "the limit itself"), left=1)
    for floor in floors:
        measured = "not measured" if floor.measured is None else f"{floor.measured:.2f} {floor.unit}"
        bound = "at most" if floor.at_most else "at least"
        verdict = "" if floor.met is None else ("met" if floor.met else "NOT met")
        limit = "" if floor.limit is None else f"{floor.limit:.2f} {floor.unit}"
        table.add_row(floor.what, measured, f"{bound} {floor.wanted:g} {floor.unit}", verdict, limit)
    _console(stream).print(table)


def _rates(rows: Sequence[Row], op: str) -> Table:
    names = ("call", "over", "memory", "blocks", "first", "GB/s", "spread", "limit", "x limit")
    table = _table(op, (*names, "peer", "GB/s", "x peer", "CPU s/GiB"), left=4)
    for row in rows:
        table.add_row(
            row.call,
            row.transport,
            row.memory,
            f"{row.blocks} x {size_text(row.block_bytes)} x {row.tensors}",
            f"{row.bytes / row.first_seconds / 1e9:.2f}",
            _number(row.gb_per_s),
            f"{row.bytes / row.seconds_max / 1e9:.2f} to {row.bytes / row.seconds_min / 1e9:.2f}",
            f"{row.limit} {_number(row.limit_gb_per_s)}" if row.limit else "",
            _number(row.ratio_to_limit),
            row.peer or "",
            _number(row.peer_gb_per_s),
            _number(row.ratio_to_peer),
            _number(row.cpu_seconds_per_gib),
        )
    return table


def _times(rows: Sequence[Row], op: str) -> Table:
    names = ("call", "over", "blocks", "busy", "first us", "p50 us", "p90 us", "p99 us", "a tensor us")
    table = _table(op, (*names, "peer", "p50 us", "x peer"), left=4)
    for row in rows:
        table.add_row(
            row.call,
            row.transport,
            f"{row.blocks} x {size_text(row.block_bytes)} x {row.tensors}",
            row.busy or "",
            *(_us(each) for each in (row.first_seconds, row.seconds_median, row.seconds_p90, row.seconds_p99)),
            _us(row.seconds_median / row.tensors) if row.op == Op.ALLOC else "",
            row.peer or row.limit or "",
            _us(row.peer_seconds_median if row.peer else row.limit_seconds_median),
            _number(row.ratio_to_peer if row.peer else row.ratio_to_limit),
        )
    return table


def _table(title: str, names: Sequence[str], *, left: int) -> Table:
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number < left else "right", no_wrap=True)
    return table


def _console(stream: TextIO) -> Console:
    return Console(file=stream, highlight=False, width=None if stream.isatty() else _WIDTH)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"
