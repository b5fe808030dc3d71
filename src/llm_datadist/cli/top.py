"""``llm-datadist top``: the LLMDataDists of this user on this host, live or once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from llm_datadist._statistics_page import instances
from llm_datadist.cli.top_rows import LINK_COLUMNS, OPERATION_COLUMNS, link_rows, operation_rows, title

if TYPE_CHECKING:
    from llm_datadist.cli.top_rows import Instance

__all__ = ["top"]


def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: one JSON object.")] = False,
) -> None:
    """Show links, operations, pools and grants of all instances of this user on this host, once a second."""
    if as_json and not once:
        raise typer.BadParameter("--json needs --once")
    if not once:
        from llm_datadist.cli.top_screen import Top

        Top().run()
        return
    found = instances()
    if as_json:
        print(msgspec.json.encode({"instances": found}).decode())
    elif found:
        for instance in found:
            _show(instance)
    else:
        print("no LLMDataDist of this user runs on this host")


def _show(instance: Instance) -> None:
    console = Console()
    console.print(title(instance), highlight=False, markup=False)
    for columns, rows in ((LINK_COLUMNS, link_rows(instance)), (OPERATION_COLUMNS, operation_rows(instance))):
        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        console.print(table)
