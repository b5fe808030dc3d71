"""``llm-datadist cpp``: where header and library for C++ programs are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llm_datadist._native import _native


def cpp(
    cflags: Annotated[bool, typer.Option("--cflags", help="Print the options of a compiler.")] = False,
    libs: Annotated[bool, typer.Option("--libs", help="Print the options of a linker.")] = False,
    cmake_dir: Annotated[bool, typer.Option("--cmake-dir", help="Print the folder for llm_datadist_DIR.")] = False,
) -> None:
    """Print what C++ programs are built with. Without an option: the folder of header and library."""
    folder = Path(_native.__file__).parent.parent / "cpp"  # beside the native module, also of an editable installation
    lib = folder / "lib"
    asked = {f"-I{folder / 'include'}": cflags, f"-L{lib} -Wl,-rpath,{lib} -lllm_datadist": libs}
    asked[str(lib / "cmake" / "llm_datadist")] = cmake_dir
    print(*([each for each, wanted in asked.items() if wanted] or [folder]))
