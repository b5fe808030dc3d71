"""The screen of ``llm-datadist top``, on textual."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.widgets import DataTable, Footer, Static

from llm_datadist.cli.top_rows import LINK_COLUMNS, NOTHING, OPERATION_COLUMNS, Rates, link_rows, operation_rows, title
from llm_datadist.cli.top_source import SourceError

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from llm_datadist._statistics_page import Instance
    from llm_datadist.cli.top_source import Read


class Top(App[None]):
    """Instances, and the links and operations of all or one of them; reads them once a second."""

    BINDINGS: ClassVar = [
        ("i", "next_instance", "next instance, or all"),
        ("e", "explain", "why this transport"),
        ("q", "quit", "quit"),
    ]

    def __init__(self, read: Read) -> None:
        super().__init__()
        self._read = read
        self.found: list[Instance] = []
        self._chosen: tuple[int, int] | None = None  # pid and cluster id of the instance that is shown, None for all
        self._rates = Rates()

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Static(id="instances", markup=False)
        yield DataTable(id="links", cursor_type="row")
        yield DataTable(id="operations", cursor_type="none")
        yield Static(id="reason", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to read."""
        self.query_one("#links", DataTable).add_columns("of", *LINK_COLUMNS, "GB/s read", "GB/s written")
        self.query_one("#operations", DataTable).add_columns("of", *OPERATION_COLUMNS, "calls/s")
        self.refresh_tables()
        self.set_interval(1.0, self.refresh_tables)

    def refresh_tables(self) -> None:
        """Show what the instances publish now; after a failure, what they published before it, and the failure."""
        try:
            found = self._read(0.0)
            remark = "connecting" if found is None else "" if found else NOTHING
            self.found = found or []
        except SourceError as error:
            remark = f"{error}; what is shown is old"
        lines = [("> " if self._chosen == _identity(each) else "  ") + title(each) for each in self.found]
        self.query_one("#instances", Static).update("\n".join(lines + [remark] * bool(remark)))
        self._show_chosen()

    def _show_chosen(self) -> None:
        links, operations = self.query_one("#links", DataTable), self.query_one("#operations", DataTable)
        row = links.cursor_row
        links.clear()
        operations.clear()
        for each in self._shown():
            name, when, statistics = str(each["cluster_id"]), each["published_at"], each["statistics"]
            for cells, link in zip(link_rows(each), statistics["links"], strict=True):
                key = (*_identity(each), link["remote_cluster_id"])
                rates = self._rates.of(key, when, link["read_bytes"], link["written_bytes"])
                links.add_row(name, *cells, *([f"{rate / 1e9:.3f}" for rate in rates] or ["", ""]))
            for cells in operation_rows(each):
                operation, transport, calls, *_ = cells
                rates = self._rates.of((*_identity(each), operation, transport), when, int(calls))
                operations.add_row(name, *cells, *([f"{rate:.1f}" for rate in rates] or [""]))
        links.move_cursor(row=row)

    def _shown(self) -> list[Instance]:
        return [each for each in self.found if self._chosen in (None, _identity(each))]

    def action_next_instance(self) -> None:
        """Show the links and operations of the next instance alone; after the last one those of all."""
        choices = [None, *map(_identity, self.found)]
        place = choices.index(self._chosen) if self._chosen in choices else 0
        self._chosen = choices[(place + 1) % len(choices)]
        self.refresh_tables()

    def action_explain(self) -> None:
        """Say why the link under the cursor has its transport."""
        every = [link for each in self._shown() for link in each["statistics"]["links"]]
        row = self.query_one("#links", DataTable).cursor_row
        reason = every[row]["reason"] if 0 <= row < len(every) else "no link"
        self.query_one("#reason", Static).update(reason)


def _identity(instance: Instance) -> tuple[int, int]:
    return instance["pid"], instance["cluster_id"]
