"""``llm-datadist top``: this user's instances on one host, live or once."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Final

import typer

from llm_datadist._statistics_page import instances
from llm_datadist._tables import show_table
from llm_datadist.tools.cli.top_rows import NOTHING, Rates, busy, instance_rows, link_rows, operation_rows, shortened
from llm_datadist.tools.cli.top_source import Remote, SourceError, encode
from llm_datadist.tools.cli.usage import failing

if TYPE_CHECKING:
    from llm_datadist._statistics_page import Instance
    from llm_datadist.tools.cli.top_source import Read

_PERIOD: Final = 1.0
_WAIT_SECONDS: Final = 10.0


def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line: once, or each second.")
    ] = False,
    hide_idle: Annotated[
        bool, typer.Option("--hide-idle", help="Leave out instances without a link that have moved nothing.")
    ] = False,
    connect: Annotated[
        str | None, typer.Option("--connect", metavar="HOST", help="Show this user's instances there, over ssh.")
    ] = None,
    command: Annotated[
        str, typer.Option("--command", help="With --connect: this program's name for the shell there.")
    ] = "llm-datadist",
) -> None:
    """Show links, operations, pools and grants of your instances. They are of one host, read once a second."""
    if connect is not None and (not connect or connect.startswith("-")):
        raise typer.BadParameter(f"--connect must name a host as ssh knows it, not {connect!r}")
    if not (once or as_json or sys.stdout.isatty()):
        raise typer.BadParameter("standard output is no terminal: --once prints once, --json prints each second")
    if connect is None:
        _show(lambda _: instances(), once, as_json, hide_idle)
        return
    with failing("top", SourceError, status=1), closing(Remote(connect, command)) as remote:
        _show(remote.read, once, as_json, hide_idle)


def _show(read: Read, once: bool, as_json: bool, hide_idle: bool) -> None:
    kept = busy if hide_idle else list
    if as_json:
        print(encode(kept(_awaited(read))), flush=True)
        while not once:
            time.sleep(_PERIOD)
            print(encode(kept(_awaited(read))), flush=True)
    elif once:
        found = _awaited(read)
        _print(kept(found)) if found else print(NOTHING)
    else:
        from llm_datadist.tools.cli.top_screen import Top

        Top(read, hide_idle=hide_idle).run()


def _awaited(read: Read) -> list[Instance]:
    if (found := read(_WAIT_SECONDS)) is None:
        raise SourceError(f"the other host has said nothing for {_WAIT_SECONDS:.0f} s")
    return found


def _print(found: list[Instance]) -> None:
    parts = {"instances": instance_rows(found), "links": link_rows(found, Rates())}
    for name, rows in (parts | {"operations": operation_rows(found, Rates())}).items():
        if rows:  # a terminal gets what the screen shows first, a pipe everything
            show_table(name, shortened(rows, found) if sys.stdout.isatty() else rows, sys.stdout, cut=True)
