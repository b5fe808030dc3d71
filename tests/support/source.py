"""The source tree as the tests about it see it."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from unittest import mock

ROOT: Final = Path(__file__).parent.parent.parent
PACKAGE: Final = "llm_datadist"
SOURCE: Final = ROOT / "src" / PACKAGE
#: For the environment of child processes that import the library and the tests from here.
PATHS: Final = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever that is, with this tree's code; return what it printed."""
    usual: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 100, "env": os.environ | PATHS}
    return subprocess.run(command, check=False, **(usual | options))


def run_here(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``llm-datadist`` in this process: an interpreter of its own takes half a second of a processor."""
    from llm_datadist.tools.cli import main  # needs the extra [cli]

    out, err = io.StringIO(), io.StringIO()
    argv, environ = mock.patch.object(sys, "argv", ["llm-datadist", *words]), mock.patch.dict(os.environ, environment)
    with argv, environ, redirect_stdout(out), redirect_stderr(err):
        status = main()
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def compiled(name: str) -> Path:
    """Return the file of a compiled module of the library: an installed tree has it elsewhere than its source."""
    spec = find_spec(f"{PACKAGE}._native.{name}")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name; a package's name stands for its ``__init__``.

    A compiled module is there as its stub.
    """
    found = {}
    for path in sorted([*SOURCE.rglob("*.py"), *SOURCE.rglob("*.pyi")]):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found
