"""How the demo shows what it does: plain lines, or bars and a table on a terminal that has rich."""

from __future__ import annotations

import importlib.util
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import TaskID

__all__ = ["PlainReporter", "Reporter", "RichReporter", "make_reporter"]


class Reporter(ABC):
    """Where the runner puts what the user should see while it works."""

    @abstractmethod
    def say(self, role: str, text: str) -> None:
        """Show one line said by ``role``."""

    @abstractmethod
    def progress(self, role: str, what: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` units of ``what`` are done."""

    @abstractmethod
    def show(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Show the result: a title and (name, value) rows."""

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal as it was. Idempotent."""


class PlainReporter(Reporter):
    """Lines with the seconds since the start; of a long task one line for each quarter."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started = time.monotonic()
        self._quarters: dict[tuple[str, str], int] = {}

    def say(self, role: str, text: str) -> None:
        """Write one line."""
        self._write(f"{time.monotonic() - self._started:6.1f} s  {role:<9}  {text}")

    def progress(self, role: str, what: str, done: int, total: int) -> None:
        """Write a line when another quarter is done."""
        quarter = 4 * done // total
        if quarter > self._quarters.get((role, what), 0):
            self._quarters[role, what] = quarter
            self.say(role, f"{what}: {done} of {total} tokens")

    def show(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Write the title and one line for each row."""
        self._write(f"\n{title}")
        for name, value in rows:
            self._write(f"  {name:<12} {value}")

    def close(self) -> None:
        """Nothing to undo."""

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class RichReporter(Reporter):
    """Progress bars and a table, by rich."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = Console(file=stream, highlight=False)
        self._bars = Progress(
            TextColumn("[bold cyan]{task.fields[role]:<9}[/]"),
            TextColumn("{task.description:<8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            console=self._console,
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._bars.start()

    def say(self, role: str, text: str) -> None:
        """Print one line above the bars."""
        from rich.markup import escape

        self._console.print(f"[bold cyan]{role:<9}[/] {escape(text)}")

    def progress(self, role: str, what: str, done: int, total: int) -> None:
        """Move the bar of that task, which appears with its first call."""
        if (role, what) not in self._tasks:
            self._tasks[role, what] = self._bars.add_task(what, total=total, role=role)
        self._bars.update(self._tasks[role, what], completed=done)

    def show(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print the table."""
        from rich.table import Table
        from rich.text import Text

        self.close()
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column()
        for name, value in rows:
            table.add_row(name, Text(value))
        self._console.print(table)

    def close(self) -> None:
        """Stop redrawing and give the cursor back."""
        self._bars.stop()


def make_reporter(stream: TextIO) -> Reporter:
    """Return the reporter that fits ``stream``: rich for a terminal, plain lines otherwise."""
    if stream.isatty() and importlib.util.find_spec("rich") is not None:
        return RichReporter(stream)
    return PlainReporter(stream)
