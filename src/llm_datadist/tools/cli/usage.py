"""Examples, mistakes and Ctrl-C of all commands."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, cast

import typer
from typer.core import TyperGroup

from llm_datadist.config import AUTH_SECRET, OPTIONS
from llm_datadist.errors import LLMException
from llm_datadist.tools.cli import FAILED, INTERRUPTED, USAGE_ERROR

if TYPE_CHECKING:
    from collections.abc import Iterator

#: ClickException; newer typers bring their own click.
_Mistake: Final = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])


class Group(TyperGroup):
    """The commands; Ctrl-C ends each with one line and status 130."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # typer's Context, whichever click it has
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("llm-datadist: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


def about(option: str) -> str:
    """Return the sentence about an option of ``init``, for the help of an argument that sets it."""
    return OPTIONS[option].meaning.replace("``", "")


Secrets = Annotated[Path | None, typer.Option(metavar="FILE", help=about(AUTH_SECRET))]
More = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of the instance. Repeatable.")]


def given(secrets: Secrets, more: More) -> dict[str, str]:
    """Return the options of ``init`` that ``--secrets`` and ``--option`` give."""
    options: dict[str, str] = {}
    for text in more or []:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"--option {text!r} is not of the form KEY=VALUE")
        options[key] = value
    return options if secrets is None else options | {AUTH_SECRET: str(secrets)}


@contextmanager
def failing(command: str, *errors: type[Exception], status: int = USAGE_ERROR) -> Iterator[None]:
    """End the command with one line and ``status`` if one of ``errors`` is raised. By default: of host or library."""
    known = errors or (OSError, LLMException)
    try:
        yield
    except known as error:
        text = str(error)
        if isinstance(error, ModuleNotFoundError):
            text = f"needs {error.name}: pip install 'open-datadist[auth]'"
        print(f"llm-datadist {command}: {text}", file=sys.stderr)
        raise typer.Exit(status) from None


def examples(*commands: str) -> str:
    """Return the end of a command's help: commands to copy."""
    return "\n".join(["\b", "Examples:", *(f"  {each}" for each in commands)])


def answer(app: typer.Typer, name: str) -> int:
    """Run a command line and return its exit status; a mistake is one line on standard error."""
    try:
        status = app(prog_name=name, standalone_mode=False)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except _Mistake as mistake:
        print(_line(mistake, name), file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:
        # The reader has ended; the interpreter must not complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return status if isinstance(status, int) else 0


def _line(mistake: typer.BadParameter, name: str) -> str:
    """Return the mistake and the help's command, or the whole help."""
    text = mistake.format_message()
    if "\n" in text:
        return text
    where = mistake.ctx.command_path if mistake.ctx is not None else name
    return f"{where}: {text.removesuffix('.')} (try '{where} --help')"
