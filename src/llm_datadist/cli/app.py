"""The commands and their options."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

# Imported for itself: without it the demo's terminal output and typer's help are not what the extra promises.
import rich  # noqa: F401
import typer

from llm_datadist.cli.bench import bench
from llm_datadist.cli.keys import keys
from llm_datadist.cli.top import top
from llm_datadist.demo.runner import run_demo
from llm_datadist.demo.workload import Memory, Setup, Transport

__all__ = ["app", "run"]

app = typer.Typer(
    name="llm-datadist",
    help="KV caches linked, published and moved between prefill and decode processes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def run() -> int:
    """Run the command line and return the exit status."""
    try:
        app(prog_name="llm-datadist")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        print(f"llm-datadist {version('open-datadist')}")
    except PackageNotFoundError:
        print("llm-datadist, run from its sources (not installed, so without a version)")
    raise typer.Exit


@app.callback()
def _common(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    transport: Annotated[
        Transport, typer.Option(help="auto lets the library choose; inproc runs both roles in one process.")
    ] = Transport.AUTO,
    memory: Annotated[
        Memory, typer.Option(help="pool: the library allocates; registered: the roles bring memory of their own.")
    ] = Memory.POOL,
    secure: Annotated[
        bool,
        typer.Option("--secure", help="Both roles prove a secret to each other; what leaves the host is encrypted."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object, last line.")] = False,
) -> None:
    """Move a real KV cache from a prompt to a decoder process and compare the tokens with a single-process run."""
    raise typer.Exit(run_demo(Setup(transport, memory), as_json=as_json, secure=secure))


app.command()(bench)
app.command()(top)
app.add_typer(keys, name="keys")
