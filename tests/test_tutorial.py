"""The tutorial does what it says: its files, its commands in two terminals, and each line that they print."""

import os
import re
import shutil
import subprocess
import sys
import termios
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from tests.support.linking import free_port
from tests.support.source import ROOT, run

TEXT: Final = (ROOT / "docs" / "tutorial.md").read_text()
#: A file, a session, a key that the reader presses: in the page's order.
_STEP: Final = re.compile(
    r"^```python\n# (?P<file>\S+)\n(?P<code>.*?)^```|^```console\n(?P<session>.*?)^```"
    r"|^(?P<enter>Press Enter in the first terminal)\.$",
    re.MULTILINE | re.DOTALL,
)
_COMMAND: Final = re.compile(r"(first|second)\$ (.*)")


class Terminal:
    """A shell. What it is sent goes to the program that runs in it, line by line, as keys do. Close it."""

    def __init__(self, folder: Path) -> None:
        self._keys, keyboard = os.openpty()
        mode = termios.tcgetattr(keyboard)
        mode[3] &= ~termios.ECHO
        termios.tcsetattr(keyboard, termios.TCSANOW, mode)
        out, error = subprocess.PIPE, subprocess.STDOUT
        self._shell = subprocess.Popen(["bash"], stdin=keyboard, stdout=out, stderr=error, text=True)
        os.close(keyboard)
        self.send(f"cd {ROOT} && . .venv/bin/activate && cd {folder}")

    def close(self) -> None:
        os.close(self._keys)  # ends what still reads from it
        self._shell.communicate()

    def send(self, line: str) -> None:
        os.write(self._keys, f"{line}\n".encode())

    def expect(self, line: str) -> None:
        """Read one line and compare it; "..." stands for anything."""
        assert self._shell.stdout is not None
        said = self._shell.stdout.readline().removesuffix("\n")
        assert re.fullmatch(re.escape(line).replace(r"\.\.\.", ".*"), said), f"{line!r} is promised, {said!r} was said"

    def expect_nothing_more(self) -> None:
        """The program has ended well, and said no more than what was read."""
        self.send("echo status $?")
        self.expect("status 0")


def play(terminals: dict[str, Terminal], session: str) -> None:
    """Type the commands of a session; compare what they print."""
    name, busy = "", False
    for line in session.splitlines():
        if (typed := _COMMAND.fullmatch(line)) is not None:
            name = typed[1]
            terminals[name].send(typed[2])
            busy = typed[2] == "python prompt.py"
        else:
            terminals[name].expect(line)
    if not busy:
        terminals[name].expect_nothing_more()


def follow(text: str, folder: Path) -> int:
    """Do what a text says, in its order; return the number of sessions."""
    text, sessions = text.replace("26000", str(free_port())), 0
    with closing(Terminal(folder)) as first, closing(Terminal(folder)) as second:
        terminals = {"first": first, "second": second}
        for step in _STEP.finditer(text):
            if step["file"]:
                (folder / step["file"]).write_text(step["code"])
            elif step["session"]:
                play(terminals, step["session"])
                sessions += 1
            else:
                first.send("")
                first.expect_nothing_more()
    return sessions


def test_the_page_installs_as_the_readme_and_the_front_page_do() -> None:
    """`make test-wheels` installs from the source; here it would compile the library once more."""
    typed = re.findall(r"first\$ (.*)", TEXT.partition("## The first pull")[0])
    assert typed == ["python3 -m venv env", ". env/bin/activate", "pip install '.[cli]'"]
    assert f"```\n{' && '.join(typed[:2])}\n{typed[2]}\n```\n" in (ROOT / "README.md").read_text()
    assert f"```\n{typed[2]}\n```\n" in (ROOT / "docs" / "index.md").read_text()


def test_every_file_and_command_of_the_tutorial_works_in_two_terminals(tmp_path: Path) -> None:
    text = TEXT.partition("## The first pull")[2]
    assert follow(text, tmp_path) == len(re.findall("^```console", text, re.MULTILINE)) == 7


def test_a_line_that_is_not_printed_as_promised_is_found(tmp_path: Path) -> None:
    wrong = "```python\n# a.py\nprint(1)\nprint(2)\n```\n```console\nsecond$ python a.py\n1\n{}```\n"
    assert follow(wrong.format("2\n"), tmp_path) == 1
    for line in ("3\n", ""):
        with pytest.raises(AssertionError, match="is promised"):
            follow(wrong.format(line), tmp_path)


def test_a_host_without_a_compiler_is_told_so_before_anything_is_made(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "CMakeLists.txt", "cmake", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (programs := tmp_path / "programs").mkdir()
    (programs / "python3").symlink_to(f"{sys.base_prefix}/bin/python3")
    before = sorted(tmp_path.iterdir())
    make = [shutil.which("make") or "make", "demo"]
    done = run(*make, cwd=tmp_path, env={"PATH": str(programs)})
    assert done.returncode != 0
    for part in ("a C++ compiler: no c++ or g++ or clang++ on the path", "apt-get install g++ ", "`make wheels`"):
        assert part in done.stderr
    assert sorted(tmp_path.iterdir()) == before
