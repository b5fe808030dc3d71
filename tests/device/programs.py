"""Programs that use the fake driver, each in a process of its own: a driver starts once in a process and may end it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import dedent
from typing import Final

from tests.support import source
from tests.support.fakecuda import State, environment, reports

BEGIN: Final = "import os\nfrom ctypes import *\nfrom tests.device.cu import *\n"
#: The first lines of most programs.
SCENE: Final = BEGIN + "start()\ns, e = stream(), event()\nat, handle = mapped(2 * MIB)\n"


def _environment(**settings: object) -> dict[str, str]:
    """Return an environment with two devices, where nothing begins that no call waits for."""
    return os.environ | source.PATHS | environment(**({"devices": 2, "delay_us": 60_000_000, "report": ""} | settings))


def run(program: str, *, scene: str = SCENE, ends: int = 0, **settings: object) -> tuple[str, list[State]]:
    """Run a program; return what it printed and its report, of which a crash leaves none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        command = [sys.executable, "-c", scene + dedent(program)]
        done = source.run(*command, env=_environment(report=report, **settings))
        assert done.returncode == ends, done.stderr
        return done.stdout, reports(report)


def begin(program: str, *fds: int) -> subprocess.Popen[str]:
    """Start a program that inherits descriptors, and reads and writes lines."""
    command, pipe = [sys.executable, "-c", BEGIN + dedent(program)], subprocess.PIPE
    return subprocess.Popen(command, env=_environment(), pass_fds=fds, text=True, stdin=pipe, stdout=pipe)


def line(process: subprocess.Popen[str]) -> str:
    """Return the next line that a program prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
