"""Symbols that the compiled modules export, and the folders of their sources."""

import re
import subprocess
from typing import Final

import pytest

from tests.native.drivers import NATIVE
from tests.support.cpp_peer import FOLDER
from tests.support.source import compiled

#: Of the native code: each includes from itself and those before it. The first is the folder that holds the others.
FOLDERS: Final = ("", "guards", "crypto", "copy", "lanes", "python")


@pytest.mark.parametrize("name", ["_limits", "_native"])
def test_a_module_exports_its_entry_and_no_library_that_is_linked_into_it(name: str) -> None:
    """Else the loader binds symbols of a static libstdc++ to those of another one in the process."""
    command = ["nm", "-D", "--defined-only", str(compiled(name))]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in listed.splitlines()] == [f"PyInit_{name}"]


def test_native_folders_include_only_from_those_before_them() -> None:
    arrows = {
        (path.relative_to(NATIVE).parent.as_posix().removeprefix("."), included)
        for path in NATIVE.rglob("*.[ch]pp")
        for included in re.findall(r'#include "(?:(\w+)/)?[\w.]+"', path.read_text())
    }
    assert [each for each in sorted(arrows) if FOLDERS.index(each[0]) < FOLDERS.index(each[1])] == []
    assert {folder for arrow in arrows for folder in arrow} == set(FOLDERS)


def test_the_library_for_cpp_exports_its_functions_and_needs_no_python() -> None:
    library = str(FOLDER / "lib" / "libllm_datadist.so")
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    exported = [line.split()[-1].removeprefix("llm_datadist_") for line in listed.splitlines()]
    assert exported == ["call", "last_error", "no_memory"]
    wanted = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    ).stdout
    assert not re.search(r"\b_?Py", wanted)
