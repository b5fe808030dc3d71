"""Symbols that the compiled modules export."""

import subprocess
from types import ModuleType

import pytest

from llm_datadist._native import _limits, _native


@pytest.mark.parametrize("module", [_limits, _native])
def test_a_module_exports_its_entry_and_no_library_that_is_linked_into_it(module: ModuleType) -> None:
    """Else the loader binds symbols of a static libstdc++ to those of another one in the process."""
    path, name = str(module.__file__), module.__name__.rpartition(".")[2]
    listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in listed.splitlines()] == [f"PyInit_{name}"]
