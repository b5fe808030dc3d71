"""The screen of ``llm-datadist top``, on textual."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.widgets import DataTable, Footer, Static

from llm_datadist._statistics_page import instances
from llm_datadist.cli.top_rows import LINK_COLUMNS, OPERATION_COLUMNS, Instance, link_rows, operation_rows, title

if TYPE_CHECKING:
    from textual.app import ComposeResult

__all__ = ["Top"]

_RATES = ("GB/s read", "GB/s written")


class Top(App[None]):
    """Instances, and the links and operations of all of them; reads the pages once a second."""

    BINDINGS: ClassVar = [("e", "explain", "why this transport"), ("q", "quit", "quit")]

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Instance] = []
        self._before: dict[tuple[int, int, int], tuple[float, int, int]] = {}
        self._rates: dict[tuple[int, int, int], list[str]] = {}

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Static(id="instances", markup=False)
        yield DataTable(id="links", cursor_type="row")
        yield DataTable(id="operations", cursor_type="none")
        yield Static(id="reason", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to read."""
        self.query_one("#links", DataTable).add_columns("of", *LINK_COLUMNS, *_RATES)
        self.query_one("#operations", DataTable).add_columns("of", *OPERATION_COLUMNS)
        self.refresh_tables()
        self.set_interval(1.0, self.refresh_tables)

    def refresh_tables(self) -> None:
        """Show what the instances publish now."""
        self.found = instances()
        text = "\n".join(map(title, self.found)) or "no LLMDataDist of this user runs on this host"
        self.query_one("#instances", Static).update(text)
        links, operations = self.query_one("#links", DataTable), self.query_one("#operations", DataTable)
        row = links.cursor_row
        links.clear()
        operations.clear()
        for each in self.found:
            name = str(each["cluster_id"])
            for shown, link in zip(link_rows(each), each["statistics"]["links"], strict=True):
                key = (each["pid"], each["cluster_id"], link["remote_cluster_id"])
                links.add_row(name, *shown, *self._rate(key, each["age_seconds"], link))
            for shown in operation_rows(each):
                operations.add_row(name, *shown)
        links.move_cursor(row=row)

    def _rate(self, key: tuple[int, int, int], age: float, link: Instance) -> list[str]:
        """Return GB/s read and written between the last two pages."""
        import time

        when, read, written = time.time() - age, link["read_bytes"], link["written_bytes"]
        before = self._before.get(key)
        if before is None or when - before[0] > 0.1:  # another page
            if before is not None:
                seconds = when - before[0]
                moved = (read - before[1], written - before[2])
                self._rates[key] = [f"{nbytes / seconds / 1e9:.3f}" for nbytes in moved]
            self._before[key] = (when, read, written)
        return self._rates.get(key, ["", ""])

    def action_explain(self) -> None:
        """Say why the link under the cursor has its transport."""
        every = [link for each in self.found for link in each["statistics"]["links"]]
        row = self.query_one("#links", DataTable).cursor_row
        reason = every[row]["reason"] if 0 <= row < len(every) else "no link"
        self.query_one("#reason", Static).update(reason)
