"""The screen of ``llm-datadist top``, on textual."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.widgets import DataTable, Footer, Static

from llm_datadist._tables import columns
from llm_datadist.tools.cli.top_rows import NOTHING, Rates, busy, instance_rows, link_rows, operation_rows, shortened
from llm_datadist.tools.cli.top_source import SourceError

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from llm_datadist._statistics_page import Instance
    from llm_datadist.tools.cli.top_rows import Rows
    from llm_datadist.tools.cli.top_source import Read


class Top(App[None]):
    """Instances, and links and operations of all or one, read once a second."""

    BINDINGS: ClassVar = [
        ("q", "quit", "quit"),
        ("i", "next_instance", "next instance, or all"),
        ("h", "hide_idle", "hide idle"),
        ("e", "explain", "why this transport"),
    ]

    def __init__(self, read: Read, *, hide_idle: bool = False) -> None:
        super().__init__()
        self._read = read
        self.found: list[Instance] = []
        self._hide_idle = hide_idle
        self._chosen: tuple[int, int] | None = None  # pid and cluster id of the shown instance; None: all
        self._rates = Rates()

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Static(id="remark", markup=False)
        yield DataTable(id="instances", cursor_type="none")
        yield DataTable(id="links", cursor_type="row")
        yield DataTable(id="operations", cursor_type="none")
        yield Static(id="reason", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to read."""
        self.query_one("#links").focus()
        self.refresh_tables()
        self.set_interval(1.0, self.refresh_tables)

    def refresh_tables(self) -> None:
        """Show the newest pages; after a failure, the last ones and the failure."""
        if not self.query("#remark"):
            return  # the screen is closing
        remark = ""
        try:
            found = self._read(0.0)
            remark = "connecting" if found is None else "" if found else NOTHING
            self.found = busy(found or []) if self._hide_idle else found or []
        except SourceError as error:
            remark = f"{error}; what is shown is old"
        self.query_one("#remark", Static).update(remark)
        shown = self._shown()
        marks = [">" if self._chosen == _identity(each) else "" for each in self.found]
        rows = [{"shown": mark} | row for mark, row in zip(marks, instance_rows(self.found), strict=True)]
        self._fill("#instances", shortened(rows, self.found))
        self._fill("#links", shortened(link_rows(shown, self._rates), self.found))
        self._fill("#operations", shortened(operation_rows(shown, self._rates), self.found))

    def _fill(self, name: str, rows: Rows) -> None:
        """Replace a table's rows, without empty columns."""
        table = self.query_one(name, DataTable)
        row, across = table.cursor_row, table.scroll_x
        table.clear(columns=True)
        table.add_columns(*(names := columns(rows)))
        for each in rows:
            table.add_row(*(each.get(name, "") for name in names))
        table.move_cursor(row=row)
        table.scroll_to(x=across, animate=False)

    def _shown(self) -> list[Instance]:
        return [each for each in self.found if self._chosen in (None, _identity(each))]

    def action_next_instance(self) -> None:
        """Show the links and operations of the next instance alone, or of all."""
        choices = [None, *map(_identity, self.found)]
        place = choices.index(self._chosen) if self._chosen in choices else 0
        self._chosen = choices[(place + 1) % len(choices)]
        self.refresh_tables()

    def action_hide_idle(self) -> None:
        """Hide or show idle instances."""
        self._hide_idle = not self._hide_idle
        self.refresh_tables()

    def action_explain(self) -> None:
        """Show the reason for the transport of the link under the cursor."""
        every = [link for each in self._shown() for link in each["statistics"]["links"]]
        row = self.query_one("#links", DataTable).cursor_row
        reason = every[row]["reason"] if 0 <= row < len(every) else "no link"
        self.query_one("#reason", Static).update(reason)


def _identity(instance: Instance) -> tuple[int, int]:
    return instance["pid"], instance["cluster_id"]
