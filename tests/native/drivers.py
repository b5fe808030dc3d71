"""The C++ drivers: programs that use the native code without an interpreter, as the sanitizers want it."""

import hashlib
import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["BUILD", "DRIVERS", "LIBRARY", "NATIVE", "ROOT", "Driver", "Unsupported", "build", "compiler"]

ROOT: Final = Path(__file__).resolve().parents[2]
NATIVE: Final = ROOT / "src" / "llm_datadist" / "_native"
LIBRARY: Final = NATIVE.with_name("cpp")
_KERNEL: Final = NATIVE / "copy" / "copy.ptx"
#: Where drivers are kept from one run to the next.
BUILD: Final = ROOT / "build" / "drivers"


class Unsupported(Exception):
    """The compiler cannot do this; says what and how to get it."""


@dataclass(frozen=True)
class Driver:
    """One program: ``<name>_driver.cpp`` beside this file."""

    name: str
    #: Arguments for fewer rounds, where each takes long.
    fewer: tuple[str, ...] = ()
    #: More of the compiler's.
    flags: tuple[str, ...] = ()

    @property
    def source(self) -> Path:
        """The file."""
        return Path(__file__).with_name(f"{self.name}_driver.cpp")


DRIVERS: Final = (
    Driver("lanes"),
    Driver("writers", ("60", "3000")),
    Driver("pool", ("12",)),
    Driver("movers"),
    Driver("boundary", flags=(f"-I{LIBRARY}/include", f"-I{sysconfig.get_path('include')}", "-rdynamic")),
)


def compiler() -> str:
    """Return the C++ compiler: CXX of the environment, or what the system calls c++ or g++."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        if shutil.which(name):
            return name
    raise Unsupported(f"no C++ compiler: {wanted or 'c++, g++ and clang++'} not found")


def build(driver: Driver, folder: Path, sanitizers: str = "") -> Path:
    """Compile a driver into a folder, unless it is there, of the same sources and flags.

    With sanitizers it stops at the first thing that they find.

    Raises:
        Unsupported: the compiler has not these sanitizers.
        subprocess.CalledProcessError: the driver does not compile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-pthread", f"-I{NATIVE}", *driver.flags]
    if sanitizers:
        flags += ["-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    if sanitizers == "thread":
        flags.append("-Wno-tsan")  # it cannot follow fences alone; where the code has one, an atomic is beside it
    binary = folder / f"{driver.name}_driver.{sanitizers.replace(',', '-') or 'plain'}"
    made_of, digest = binary.with_suffix(f"{binary.suffix}.made_of"), _digest(driver, flags)
    if binary.exists() and made_of.exists() and made_of.read_text() == digest:
        return binary
    if sanitizers:
        _check_supported(flags, folder, sanitizers)
    made_of.unlink(missing_ok=True)
    # CMake writes it otherwise.
    kernel = f'namespace datadist {{ constexpr char copy_ptx[] = R"PTX({_KERNEL.read_text()})PTX"; }}'
    (folder / "copy_ptx.hpp").write_text(f"#pragma once\n{kernel}\n")
    subprocess.run([compiler(), *flags, f"-I{folder}", str(driver.source), "-o", str(binary), "-ldl"], check=True)
    made_of.write_text(digest)
    return binary


def _digest(driver: Driver, flags: list[str]) -> str:
    """Return a digest of all that a driver is made of."""
    found = hashlib.sha256(repr([compiler(), *flags]).encode())
    for source in (
        driver.source,
        *sorted(NATIVE.rglob("*.h*")),
        *sorted(LIBRARY.rglob("*.[hc]*")),
        _KERNEL,
        driver.source.with_name("check.hpp"),
    ):
        found.update(source.read_bytes())
    return found.hexdigest()


def _check_supported(flags: list[str], folder: Path, sanitizers: str) -> None:
    empty = folder / f"empty.{sanitizers}.cpp"
    empty.write_text("int main() {}\n")
    command = [compiler(), *flags, str(empty), "-o", str(folder / f"empty.{sanitizers}")]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        reason = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Unsupported(f"{compiler()} cannot build with -fsanitize={sanitizers}: {reason}")
