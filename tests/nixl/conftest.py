"""The tests of the transport nixl run where NIXL is installed; `make test-nixl` makes an environment that has it."""

import os
from pathlib import Path

import pytest

from tests.support.probe import nixl_is_installed

# What NIXL says of peers that were killed on purpose.
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is in this folder where there is no NIXL; `make test-nixl` requires it."""
    if nixl_is_installed() or os.environ.get("LLM_DATADIST_NIXL") == "required":
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="NIXL is not installed: make test-nixl"))
