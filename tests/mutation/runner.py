"""Runs the tests of a stage in a copy of the tree, in which one module is a mutant. The working tree stays as it is."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from tests.mutation import Mutant
from tests.support.source import compiled

ROOT: Final = Path(__file__).parent.parent.parent
PACKAGE: Final = Path("src/llm_datadist")
_COMPILED: Final = compiled("_native")
#: The killer of a mutant with which the tests did not end, or could not be collected.
UNENDING: Final = "no end"
#: A mutant may take this many times as long as the code itself, and this much longer.
_SLOWER, _MORE_SECONDS = 4.0, 20.0
_BASELINE_SECONDS: Final = 3600.0
#: Stands in the copy: an editable install finds the package before PYTHONPATH does, in each child process too.
_SITE: Final = """import sys

sys.meta_path[:] = [each for each in sys.meta_path if not type(each).__module__.startswith("_editable")]
"""
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


class NoMutantError(Exception):
    """Changed C++ that does not compile."""


@dataclass(frozen=True)
class Baseline:
    """What tests do without a mutant: how long they take, and those that fail all the same, which are left out."""

    tests: Sequence[str]
    seconds: float
    failing: Sequence[str] = field(default=())


class Copy:
    """A copy of the tracked and new files of the tree and of the compiled modules. One thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        for module in _COMPILED.parent.glob("*.so"):
            shutil.copy2(module, folder / PACKAGE / "_native")
        (folder / "src/sitecustomize.py").write_text(_SITE)
        self._stale = False  # the compiled module is not that of the headers

    def baseline(self, tests: Sequence[str]) -> Baseline:
        """Run tests without a mutant.

        Raises:
            RuntimeError: The tests cannot run, or would import another copy of the package.
        """
        self._check_import()
        since = time.monotonic()
        code, output = self._pytest(["-rfE", *tests], _BASELINE_SECONDS)
        if code not in (0, 1):
            raise RuntimeError(f"pytest {' '.join(tests)} ended with {code}:\n{output[-3000:]}")
        return Baseline(tests, time.monotonic() - since, tuple(sorted(set(_FAILED.findall(output)))))

    def killer(self, mutant: Mutant, stage: Baseline) -> str | None:
        """Return the first test that fails with the mutant, UNENDING if the tests do not end, None if all pass.

        Raises:
            NoMutantError: The mutant is C++ that does not compile.
        """
        path = self.folder / PACKAGE / mutant.module
        original = path.read_text()
        left_out = [f"--deselect={each}" for each in stage.failing]
        try:
            self._write(path, mutant.code)
            seconds = _SLOWER * stage.seconds + _MORE_SECONDS
            code, output = self._pytest(["-x", "-rfE", *left_out, *stage.tests], seconds)
            failed = _FAILED.findall(output)
            return None if code == 0 else failed[0] if failed else UNENDING
        finally:
            self._write(path, original)

    def _write(self, path: Path, code: str) -> None:
        path.write_text(code)
        if path.suffix == ".hpp":
            self._stale = True
        for kept in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):  # the mutant may have its size and time
            kept.unlink()

    def _compile(self) -> None:
        """Compile the module again if a header was changed. Its build folder is made at the first time."""
        if not self._stale:
            return
        build = self.folder / "build" / "mutation"
        tools = Path(sys.executable).parent
        environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
        run = partial(subprocess.run, env=environment, capture_output=True, check=True)
        if not build.exists():
            # The tests are to find the mutant, not to be quick.
            settings = [
                "-DCMAKE_BUILD_TYPE=Debug",
                "-DCMAKE_CXX_FLAGS=-O1 -g0",
                f"-DPython_EXECUTABLE={sys.executable}",
            ]
            run(["cmake", "-S", self.folder, "-B", build, "-G", "Ninja", *settings])
        try:
            run(["ninja", "-C", build])
        except subprocess.CalledProcessError as error:
            raise NoMutantError(error.stdout.decode()[-2000:]) from error
        (module,) = build.glob("_native*.so")
        shutil.copy2(module, self.folder / PACKAGE / "_native" / _COMPILED.name)
        self._stale = False

    def _check_import(self) -> None:
        command = [sys.executable, "-c", "import llm_datadist; print(llm_datadist.__file__)"]
        output = subprocess.run(command, env=self._environment(), check=True, capture_output=True, text=True).stdout
        if not Path(output.strip()).is_relative_to(self.folder):
            raise RuntimeError(f"tests in {self.folder} would import {output.strip()}")

    def _environment(self) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": str(self.folder / "src"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self.folder / ".hypothesis"),
        }

    def _pytest(self, arguments: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """Return the exit status, or None when time was over, and what was printed."""
        self._compile()
        plugins = ["-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "tests.mutation.examples"]
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", *plugins, *arguments]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, ""
        return process.returncode, output
