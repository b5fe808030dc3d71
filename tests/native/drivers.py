"""The C++ drivers: programs that use the native code without an interpreter, as the sanitizers want it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["DRIVERS", "NATIVE", "ROOT", "Driver", "Unsupported", "build", "compiler"]

ROOT: Final = Path(__file__).resolve().parents[2]
NATIVE: Final = ROOT / "src" / "llm_datadist" / "_native"


class Unsupported(Exception):
    """The compiler cannot do this; says what and how to get it."""


@dataclass(frozen=True)
class Driver:
    """One program: ``<name>_driver.cpp`` beside this file."""

    name: str
    #: Arguments for fewer rounds, where each takes long.
    fewer: tuple[str, ...] = ()

    @property
    def source(self) -> Path:
        """The file."""
        return Path(__file__).with_name(f"{self.name}_driver.cpp")


DRIVERS: Final = (Driver("lanes"), Driver("writers", ("60", "3000")), Driver("pool", ("12",)))


def compiler() -> str:
    """Return the C++ compiler: CXX of the environment, or what the system calls c++ or g++."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        if shutil.which(name):
            return name
    raise Unsupported(f"no C++ compiler: {wanted or 'c++, g++ and clang++'} not found")


def build(driver: Driver, folder: Path, sanitizers: str = "") -> Path:
    """Compile a driver into a folder; with sanitizers it stops at the first thing that they find.

    Raises:
        Unsupported: the compiler has not these sanitizers.
        subprocess.CalledProcessError: the driver does not compile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-std=c++17", "-O1" if sanitizers else "-O0", "-Wall", "-Wextra", "-pthread", f"-I{NATIVE}"]
    if sanitizers:
        flags += ["-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
        _check_supported(flags, folder, sanitizers)
    if sanitizers == "thread":
        flags.append("-Wno-tsan")  # it cannot follow fences alone; where the code has one, an atomic is beside it
    binary = folder / f"{driver.name}_driver.{sanitizers.replace(',', '-') or 'plain'}"
    subprocess.run([compiler(), *flags, str(driver.source), "-o", str(binary)], check=True)
    return binary


def _check_supported(flags: list[str], folder: Path, sanitizers: str) -> None:
    empty = folder / f"empty.{sanitizers}.cpp"
    empty.write_text("int main() {}\n")
    command = [compiler(), *flags, str(empty), "-o", str(folder / f"empty.{sanitizers}")]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        reason = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Unsupported(f"{compiler()} cannot build with -fsanitize={sanitizers}: {reason}")
