"""What a command prints on a terminal of some width, or into a pipe; and the tables in it, read again."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping
from contextlib import suppress

from tests.support.source import ROOT, run

WIDTHS = (80, 200, None)
"""Of terminals; None for a pipe."""
_LEFT_OUT = re.compile(r"^too wide for this terminal: (.*?\n)(?=\n|\Z)", re.MULTILINE | re.DOTALL)


def printed(command: list[str], width: int | None, env: Mapping[str, str] = os.environ) -> str:
    """Return what a command prints, without colours, on a terminal of so many columns; None: in a pipe."""
    if width is None:
        return run(*command, env=env).stdout
    return uncoloured(on_terminal(command, width, env, subprocess.DEVNULL)[1]).replace("\r\n", "\n")


def on_terminal(
    command: list[str], width: int, env: Mapping[str, str] = os.environ, stderr: int | None = None
) -> tuple[int, str]:
    """Run a command with a terminal for all its streams; return its status and what it would have shown."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    said, errors = b"", there if stderr is None else stderr
    with (
        subprocess.Popen(command, stdin=there, stdout=there, stderr=errors, cwd=ROOT, env=env) as process,
        open(here, "rb", 0) as out,
        suppress(OSError),  # the terminal's end
    ):
        os.close(there)
        while data := out.read(1 << 16):
            said += data
    return process.returncode, said.decode()


def uncoloured(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def tables(text: str, width: int | None) -> dict[str, list[dict[str, str]]]:
    """Return rows by the title of their table, each cell by the name of its column; check what every table promises.

    No line is longer than the terminal, nothing is cut, and each column has a name of its own and a cell. What a table
    leaves out is not in it; :func:`left_out` tells.
    """
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= (width or 1 << 16)
    found = {}
    text = _LEFT_OUT.sub("", text)
    for part in re.split(r"(?:^|\n)\n(?=[a-z][a-z0-9 ]*\n)", text)[1:]:
        title, *lines = part.splitlines()
        found[title.strip()] = _table(lines) if set(lines[1]) == {"─"} else _lists(lines)
    return found


def left_out(text: str) -> list[list[str]]:
    """Return the columns that tables name as too wide, of each that does."""
    return [" ".join(names.split()).split(", ") for names in _LEFT_OUT.findall(text)]


def _table(lines: list[str]) -> list[dict[str, str]]:
    lines = [line.ljust(len(lines[1])) for line in lines if line.strip()]
    del lines[1]
    # Between columns all lines have two blanks at least; inside of one some line has none.
    gaps = [at for at in range(len(lines[0])) if all(line[at] == " " for line in lines)]
    ends = [at for at in gaps if at + 1 in gaps and at - 1 not in gaps and at + 2 < len(lines[0])]
    rows = [[line[a:b].strip() for a, b in zip([0, *ends], [*ends, None], strict=True)] for line in lines]
    names = rows.pop(0)
    assert len(set(names)) == len(names), names
    assert all(names), names
    assert all(any(cells) for cells in zip(*rows, strict=True)), names
    return [{name: cell for name, cell in zip(names, row, strict=True) if cell} for row in rows]


def _lists(lines: list[str]) -> list[dict[str, str]]:
    found = []
    for each in "\n".join(lines).rstrip().split("\n\n"):
        pairs: list[tuple[str, str]] = []
        for cell in filter(None, map(str.strip, re.split(r" {3,}|\n", each))):
            name, colon, value = cell.partition(": ")
            if not colon:  # of a cell that is longer than the line
                name, before = pairs.pop()
                value = f"{before} {cell}"
            pairs.append((name, value))
        assert len({name for name, _ in pairs}) == len(pairs), pairs
        found.append(dict(pairs))
    return found
