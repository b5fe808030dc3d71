"""``llm-datadist top``: the LLMDataDists of this user on this host or another one, live or once."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from llm_datadist._statistics_page import instances
from llm_datadist.cli.top_rows import LINK_COLUMNS, NOTHING, OPERATION_COLUMNS, link_rows, operation_rows, title
from llm_datadist.cli.top_source import Remote, SourceError, encode

if TYPE_CHECKING:
    from llm_datadist._statistics_page import Instance
    from llm_datadist.cli.top_source import Read

_PERIOD: Final = 1.0
_WAIT_SECONDS: Final = 10.0


def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line: once, or each second.")] = False,
    connect: Annotated[
        str | None, typer.Option("--connect", metavar="HOST", help="The instances of this user there, over ssh.")
    ] = None,
    command: Annotated[
        str, typer.Option("--command", help="With --connect: how the shell there finds this program.")
    ] = "llm-datadist",
) -> None:
    """Show links, operations, pools and grants of all instances of this user on one host, once a second."""
    if connect is not None and (not connect or connect.startswith("-")):
        raise typer.BadParameter(f"--connect must name a host as ssh knows it, not {connect!r}")
    try:
        if connect is None:
            _show(lambda _: instances(), once=once, as_json=as_json)
            return
        with closing(Remote(connect, command)) as remote:
            _show(remote.read, once=once, as_json=as_json)
    except SourceError as error:
        print(f"llm-datadist top: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _show(read: Read, *, once: bool, as_json: bool) -> None:
    if as_json:
        print(encode(_awaited(read)), flush=True)
        while not once:
            time.sleep(_PERIOD)
            print(encode(_awaited(read)), flush=True)
    elif once:
        _print(_awaited(read))
    else:
        from llm_datadist.cli.top_screen import Top

        Top(read).run()


def _awaited(read: Read) -> list[Instance]:
    found = read(_WAIT_SECONDS)
    if found is None:
        raise SourceError(f"the other host has said nothing for {_WAIT_SECONDS:.0f} s")
    return found


def _print(found: list[Instance]) -> None:
    console = Console()
    if not found:
        print(NOTHING)
    for instance in found:
        print(title(instance))
        for columns, rows in ((LINK_COLUMNS, link_rows(instance)), (OPERATION_COLUMNS, operation_rows(instance))):
            table = Table(*columns)
            for row in rows:
                table.add_row(*row)
            console.print(table)
