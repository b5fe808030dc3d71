"""Tables for terminals and pipes: no cell is cut, no column is empty. Needs rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TextIO

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PIPE_WIDTH: Final = 1 << 16


def columns(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of the columns that have a cell."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) for row in rows)]


def show_table(title: str, rows: Sequence[Mapping[str, str]], stream: TextIO, *, cut: bool = False) -> None:
    """Print rows (column name -> cell) as a table, or, if it is too wide, as lists of cells.

    With ``cut`` a table that is too wide leaves out its last columns, and names them below.
    """
    width = None if stream.isatty() else _PIPE_WIDTH
    console = Console(file=stream, highlight=False, markup=False, emoji=False, width=width)
    names, left_out = columns(rows), list[str]()
    while not (fits := _fits(table := _table(names, rows), console)) and cut and len(names) > 1:
        left_out.insert(0, names.pop())
    console.print(f"\n{title}", style="bold")
    if fits:
        console.print(table)
        if left_out:
            console.print(f"too wide for this terminal: {', '.join(left_out)}")
        return
    for row in rows:
        console.print(Columns([f"{name}: {cell}" for name, cell in row.items() if cell], padding=(0, 3)))
        console.print()


def _table(names: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        figures = all(cell[0] in "0123456789<-" for row in rows if (cell := row.get(name)))
        table.add_column(name, justify="right" if figures else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row.get(name, "") for name in names))
    return table


def _fits(table: Table, console: Console) -> bool:
    return table.__rich_measure__(console, console.options.update(max_width=_PIPE_WIDTH)).maximum <= console.width
