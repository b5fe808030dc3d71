"""Symbols that the compiled modules export."""

import subprocess

import pytest

from tests.support.source import compiled


@pytest.mark.parametrize("name", ["_limits", "_native"])
def test_a_module_exports_its_entry_and_no_library_that_is_linked_into_it(name: str) -> None:
    """Else the loader binds symbols of a static libstdc++ to those of another one in the process."""
    command = ["nm", "-D", "--defined-only", str(compiled(name))]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in listed.splitlines()] == [f"PyInit_{name}"]
