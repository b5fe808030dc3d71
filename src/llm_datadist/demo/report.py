"""Output of the demo: plain lines, or bars and a table on a terminal. Needs rich."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence


class DemoReporter:
    """Plain lines with the seconds since the start; one for each quarter of a task."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started = time.monotonic()
        self._quarters: dict[tuple[str, str], int] = {}

    def say(self, role: str, text: str) -> None:
        """Show one line from ``role``."""
        self._write(f"{time.monotonic() - self._started:6.1f} s  {role:<9}  {text}")

    def progress(self, role: str, what: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` units of ``what`` are done."""
        quarter = 4 * done // total
        if quarter > self._quarters.get((role, what), 0):
            self._quarters[role, what] = quarter
            self.say(role, f"{what}: {done} of {total} tokens")

    def show(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Show the result: a title and (name, value) rows."""
        self._write(f"\n{title}")
        for name, value in rows:
            self._write(f"  {name:<12} {value}")

    def close(self) -> None:
        """Restore the terminal. Idempotent."""

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class _RichReporter(DemoReporter):
    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._console = Console(file=stream, highlight=False)
        self._bars = Progress(
            TextColumn("[bold cyan]{task.fields[role]:<9}[/]"),
            TextColumn("{task.description:<8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            console=self._console,
            auto_refresh=False,  # no thread here runs beside the timed pull
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._bars.start()

    def say(self, role: str, text: str) -> None:
        self._console.print(f"[bold cyan]{role:<9}[/] {escape(text)}")

    def progress(self, role: str, what: str, done: int, total: int) -> None:
        if (role, what) not in self._tasks:
            self._tasks[role, what] = self._bars.add_task(what, total=total, role=role)
        self._bars.update(self._tasks[role, what], completed=done, refresh=True)

    def show(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        self.close()
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column()
        for name, value in rows:
            table.add_row(name, Text(value))
        self._console.print(table)

    def close(self) -> None:
        self._bars.stop()


def make_reporter(stream: TextIO) -> DemoReporter:
    """Return bars and a table for a terminal, else plain lines."""
    return _RichReporter(stream) if stream.isatty() else DemoReporter(stream)
